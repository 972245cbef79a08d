"""Connects to the user's Ray cluster, or starts a local one; finds clusters on this machine."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import ceil
from types import FrameType

import ray

from rayzero.engine.errors import ConfigError, first_line
from rayzero.orchestrator.cluster.addresses import (
    ADDRESS_VARIABLE,
    HOST_PORT,
    RECONNECT_VARIABLE,
    Address,
    check_listens,
    head_address,
    other_grpc_error,
)
from rayzero.orchestrator.cluster.local_cluster import LocalCluster
from rayzero.orchestrator.cluster.ray_api import (
    AuthRefusedError,
    check_auth,
    connected_address,
    join_cluster,
    local_head_addresses,
    stop_error_printer,
)


def await_lost_head(limit_s: float) -> None:
    """Lets a connection that this process opens later wait so long for a head that is lost, unless
    the user has set the time. Ray would end the process."""
    if not ray.is_initialized():
        os.environ.setdefault(RECONNECT_VARIABLE, str(ceil(limit_s)))


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
        _check_connected_to(address)
        return ClusterConnection(owned=False, can_grow=True)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    named = head_address(address)
    if named.text in ("", "local"):
        local = local or LocalCluster(worker_env=None)
        with preserve_process_state():
            local.start()
        return ClusterConnection(owned=True, can_grow=False, local=local)
    text = _only_local_head() if named.text == "auto" else named.text
    check_reachable(Address(text, named.is_variable))
    try:
        with preserve_process_state():
            join_cluster(text)
    except (ConnectionError, ValueError, RuntimeError) as error:
        mismatch = _version_mismatch_error(named, error)
        raise mismatch or named.error(first_line(error)) from None
    return ClusterConnection(owned=True, can_grow=True)


def find_clusters(address: str | None) -> list[str]:
    """The address of the cluster at `address` or RAY_ADDRESS; without either, of every cluster
    whose head node runs on this machine. In a process that is connected to Ray: `auto`. Raises
    ConfigError if there is none."""
    if ray.is_initialized():
        _check_connected_to(address)
        return ["auto"]
    named = head_address(address)
    if named.is_named:
        return [named.text]
    addresses = local_head_addresses()
    if not addresses:
        raise ConfigError(
            "no Ray cluster runs on this machine",
            allowed="the machine of the cluster's head node, or the cluster's address",
            fix=f"--address or {ADDRESS_VARIABLE}: host:port of the head node",
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
    is_named = not ray.is_initialized() and head_address(address).is_named
    errors = []
    for candidate in addresses:
        try:
            cluster = connect(address if is_named else candidate)
        except ConfigError as error:
            if is_named or len(addresses) == 1:
                raise
            errors.append(error)
            continue
        yield cluster
        cluster.close()
    refused = [error for error in errors if isinstance(error, AuthRefusedError)]
    if refused and len(errors) == len(addresses):
        raise refused[-1]


def check_reachable(named: Address) -> None:
    """Checks that a head node listens at host:port and accepts the token. `ray.init` would retry
    for minutes without a way to interrupt it. Other addresses, such as `auto`, are not checked.
    Raises NothingListensError; ConfigError for another server; AuthRefusedError if the token is
    rejected."""
    deadline = check_listens(named)
    if named.is_named and not check_auth(named.text, deadline.left_s):
        raise other_grpc_error(named, deadline)


def _only_local_head() -> str:
    """Returns the address that `auto` stands for. Of several clusters, the one of RAY_ADDRESS, if
    that is one of them; if none can be seen from here, `auto`, for Ray to look in its files. Raises
    ConfigError if it could be any of several."""
    addresses = sorted(local_head_addresses())
    if os.environ.get(ADDRESS_VARIABLE) in addresses:
        return os.environ[ADDRESS_VARIABLE]
    return only_cluster(addresses) if addresses else "auto"


def only_cluster(addresses: Sequence[str]) -> str:
    """The one of these. Raises ConfigError if there are several."""
    if len(addresses) != 1:
        raise ConfigError(
            f"{len(addresses)} Ray clusters run on this machine: {', '.join(addresses)}",
            allowed="one cluster",
            fix=f"name the cluster with --address or {ADDRESS_VARIABLE}",
        )
    return addresses[0]


def _check_connected_to(address: str | None) -> None:
    """Raises ConfigError if `address` is not that of the cluster to which this process is
    connected."""
    named = Address("") if address is None else head_address(address)
    if not named.is_named or _is_same_server(named.text, connected := connected_address()):
        return
    raise ConfigError(
        f"address {named.shown} is not that of the cluster {connected!r}, to which this process is "
        "connected already (`ray.init`)",
        allowed="one cluster in a process",
        fix="leave the address out, or call `ray.shutdown()` before",
    )


def _is_same_server(first: str, second: str) -> bool:
    """Whether two host:port name one server: the same port of the same host, or of this one."""
    matches = [HOST_PORT.fullmatch(text) for text in (first, second)]
    if None in matches:
        return first == second
    hosts = [_ips(match["host"]) for match in matches if match]
    ports = {match["port"] for match in matches if match}
    return len(ports) == 1 and (bool(hosts[0] & hosts[1]) or all(map(_are_own, hosts)))


def _ips(host: str) -> set[str]:
    with suppress(OSError, UnicodeError):
        return {str(found[4][0]) for found in socket.getaddrinfo(host.strip("[]"), None)}
    return set()


def _are_own(ips: set[str]) -> bool:
    """Whether one of them is an address of this machine."""
    for ip in ips:
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as own:
            own.bind((ip, 0))
            return True
    return False


def _version_mismatch_error(named: Address, error: Exception) -> ConfigError | None:
    """None if the error is not Ray's refusal of other versions of Ray or Python."""
    versions = re.findall(r"^ *(Ray|Python): (\S+)", str(error), re.MULTILINE)
    if [name for name, _ in versions] != ["Ray", "Python"] * 2:
        return None
    cluster, process = (" and ".join(map(" ".join, part)) for part in (versions[:2], versions[2:]))
    return ConfigError(
        f"the cluster at {named.shown} has {cluster}, and this process {process}",
        allowed="exactly the same versions",
        fix="install them here, or use --address http://HOST:8265, which runs the command there",
    )
