"""Connects to the user's Ray cluster, or starts a local one; finds clusters on this machine."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import ray

from rayzero.engine.errors import ConfigError, first_line
from rayzero.orchestrator.cluster.local_cluster import LocalCluster
from rayzero.orchestrator.cluster.ray_api import (
    AuthRefusedError,
    check_auth,
    join_cluster,
    local_head_addresses,
    stop_error_printer,
)

_CONNECT_TIMEOUT_S = 5.0


@contextmanager
def preserve_process_state() -> Iterator[None]:
    """Undoes side effects of `ray.init` inside the `with`.

    - Its thread that prints the cluster's errors to stdout is stopped: the job reports its own.
    - Its SIGTERM handler, which prints a stack and ends the process at once, is replaced by the
      previous one. If there was none, SIGTERM raises SystemExit in the main thread, so that
      `finally` blocks and `atexit` handlers run.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if is_main else None
    try:
        yield
        stop_error_printer()
        handler = _exit_on_sigterm if handler is signal.SIG_DFL else handler
    finally:
        if handler is not None:  # None: not the main thread, or a handler that is not Python's
            signal.signal(signal.SIGTERM, handler)


def _exit_on_sigterm(number: int, frame: FrameType | None) -> None:
    del frame
    raise SystemExit(128 + number)


@dataclass(frozen=True)
class ClusterConnection:
    """A connection to Ray. It is `owned` if `connect` opened it; then `close` closes it. The
    cluster `can_grow` if nodes may join it, which they may not if it is a `local` one."""

    owned: bool
    can_grow: bool
    local: LocalCluster | None = None

    @property
    def is_local(self) -> bool:
        """Whether this process started the cluster, which then ends with it."""
        return self.local is not None

    def close(self) -> None:
        """Closes the connection if it is owned, and ends a local cluster. Idempotent."""
        if self.local is not None:
            self.local.stop()
        elif self.owned and ray.is_initialized():
            ray.shutdown()


def connect(address: str | None, local: LocalCluster | None = None) -> ClusterConnection:
    """Connects to the cluster at `address` or RAY_ADDRESS; without either starts a local cluster:
    `local`, which it takes over, or one without a fork server. In a process that is connected to
    Ray already it returns that connection. Raises ConfigError if there is no cluster at that
    address; JobFailedError if a local one could not be started."""
    if ray.is_initialized():
        return ClusterConnection(owned=False, can_grow=True)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = head_address(address) or "local"
    if address == "local":
        local = local or LocalCluster(worker_env=None)
        with preserve_process_state():
            local.start()
        return ClusterConnection(owned=True, can_grow=False, local=local)
    check_reachable(address)
    try:
        with preserve_process_state():
            join_cluster(address)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise _version_mismatch_error(address, error) or _no_cluster_error(address, error) from None
    return ClusterConnection(owned=True, can_grow=True)


def head_address(address: str | None) -> str:
    """`address`, or else RAY_ADDRESS, or else an empty string. Raises ConfigError for an address of
    Ray Client or of a dashboard, which a process outside the cluster cannot join."""
    address = address or os.environ.get("RAY_ADDRESS") or ""
    if address.startswith("ray://"):
        raise ConfigError(
            f"address {address!r} is an address of Ray Client, which rayzero does not support",
            allowed="host:port of a cluster that this machine is part of, or `auto`",
            fix="from outside the cluster: `ray job submit --address http://HOST:8265 -- "
            "rayzero run job.yaml`",
        )
    if address.startswith(("http://", "https://")):
        raise ConfigError(
            f"address {address!r} is a dashboard's, and a job in Python joins the cluster",
            allowed="host:port of a cluster that this machine is part of, or `auto`",
            fix=f"from outside the cluster: `ray job submit --address {address} -- python FILE.py`",
        )
    return address


def find_clusters(address: str | None) -> list[str]:
    """The address of the cluster at `address` or RAY_ADDRESS; without either, of every cluster
    whose head node runs on this machine. In a process that is connected to Ray: `auto`. Raises
    ConfigError if there is none."""
    if ray.is_initialized():
        return ["auto"]
    named = head_address(address)
    if named not in ("", "auto", "local"):
        return [named]
    addresses = local_head_addresses()
    if not addresses:
        raise ConfigError(
            "no Ray cluster runs on this machine",
            allowed="the machine of the cluster's head node, or the cluster's address",
            fix="--address or RAY_ADDRESS: host:port of the head node",
        )
    return sorted(addresses)


def connect_each(address: str | None) -> Iterator[ClusterConnection]:
    """Connects to each of `find_clusters` in turn. Raises ConfigError if there is no cluster, or
    the named one cannot be connected to; AuthRefusedError if all of them rejected the token.

    A connection is closed when the next one is requested; the last one is the caller's to close if
    it stops early. Clusters that were not named and cannot be connected to are skipped, unless
    there is only one.
    """
    addresses = find_clusters(address)
    errors = []
    for candidate in addresses:
        try:
            cluster = connect(candidate)
        except ConfigError as error:
            if address is not None or len(addresses) == 1:
                raise
            errors.append(error)
            continue
        yield cluster
        cluster.close()
    refused = [error for error in errors if isinstance(error, AuthRefusedError)]
    if refused and len(errors) == len(addresses):
        raise refused[-1]


def check_reachable(address: str) -> None:
    """Checks that a head node listens at host:port and accepts the token. `ray.init` would retry
    for minutes without a way to interrupt it. Other addresses, such as `auto`, are not checked.
    Raises ConfigError if nothing listens there; AuthRefusedError if the token is rejected."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster_error(address, error) from None
    check_auth(address)


def _no_cluster_error(address: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"there is no Ray cluster at {address!r}: {first_line(error)}",
        allowed="host:port of the head node of a running cluster, or `auto`",
        fix="--address or RAY_ADDRESS; without either, a local cluster is started",
    )


def _version_mismatch_error(address: str, error: Exception) -> ConfigError | None:
    """None if the error is not Ray's refusal of other versions of Ray or Python."""
    versions = re.findall(r"^ *(Ray|Python): (\S+)", str(error), re.MULTILINE)
    if [name for name, _ in versions] != ["Ray", "Python"] * 2:
        return None
    cluster, process = (" and ".join(map(" ".join, part)) for part in (versions[:2], versions[2:]))
    return ConfigError(
        f"the cluster at {address!r} has {cluster}, and this process {process}",
        allowed="exactly the same versions",
        fix="install them here, or use --address http://HOST:8265, which runs the command there",
    )
