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
    """Makes connections that this process opens later wait `limit_s` for a head that is lost,
    unless the user has set the time. By default, Ray would end the process sooner."""
    if not ray.is_initialized():
        os.environ.setdefault(RECONNECT_VARIABLE, str(ceil(limit_s)))


@contextmanager
def preserve_process_state() -> Iterator[None]:
    """Undoes side effects of `ray.init` inside the `with`.

    - Ray's thread that prints the cluster's errors to stdout is stopped: the job reports its own.
    - Ray's SIGTERM handler, which prints a stack and ends the process at once, is replaced by the
      previous handler. If there was none, SIGTERM raises SystemExit in the main thread, so that
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
    """A connection to Ray. It is `owned` if `connect` has opened it; then `close` closes it. The
    cluster `can_grow` if nodes may join it. `local` is the cluster that this process has started,
    if it has; no node may join such a cluster."""

    owned: bool
    can_grow: bool
    local: LocalCluster | None = None

    @property
    def is_local(self) -> bool:
        """Whether this process started the cluster. The cluster then ends with this process."""
        return self.local is not None

    def close(self) -> None:
        """Closes the connection if it is owned, and ends a local cluster. Idempotent."""
        if self.local is not None:
            self.local.stop()
        elif self.owned and ray.is_initialized():
            ray.shutdown()


def connect(address: str | None, local: LocalCluster | None = None) -> ClusterConnection:
    """Connects to the cluster at `address` or RAY_ADDRESS; without either, starts a local cluster.
    If this process is connected to Ray already, returns that connection. Raises ConfigError if
    there is no cluster at that address; JobFailedError if a local one could not be started.

    Args:
        local: the local cluster to start, which the connection then owns; by default a new one
            without a fork server.
    """
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
    """Returns `address` or RAY_ADDRESS; without either, the addresses of all clusters whose head
    node runs on this machine. In a process that is connected to Ray, returns `auto`. Raises
    ConfigError if there is no cluster."""
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
            fix=f"set --address or {ADDRESS_VARIABLE} to host:port of the head node",
        )
    return sorted(addresses)


def connect_each(address: str | None) -> Iterator[ClusterConnection]:
    """Connects to each cluster of `find_clusters` in turn.

    A connection is closed when the next one is requested. A caller that stops early closes the last
    connection itself. A cluster to which this process cannot connect is skipped, unless it was
    named or is the only one.

    Raises:
        ConfigError: there is no cluster, or the named or only one cannot be reached.
        AuthRefusedError: no cluster could be reached, and one at least rejected the token.
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
    """Checks that a head node listens at host:port and accepts the token, because `ray.init` would
    retry for minutes without a way to interrupt it. Other addresses, such as `auto`, are not
    checked. Raises NothingListensError; ConfigError for another server; AuthRefusedError if the
    token is rejected."""
    deadline = check_listens(named)
    if named.is_named and not check_auth(named.text, deadline.left_s):
        raise other_grpc_error(named, deadline)


def _only_local_head() -> str:
    """Returns the address that `auto` stands for: RAY_ADDRESS if it names one of this machine's
    clusters, or else the only cluster. If this process sees none, returns `auto`, because Ray also
    looks in its files. Raises ConfigError if there are several."""
    addresses = sorted(local_head_addresses())
    if os.environ.get(ADDRESS_VARIABLE) in addresses:
        return os.environ[ADDRESS_VARIABLE]
    return only_cluster(addresses) if addresses else "auto"


def only_cluster(addresses: Sequence[str]) -> str:
    """Returns the only address of a list. Raises ConfigError if there are several."""
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
    """Returns whether two addresses host:port name the same server: the same port of the same host,
    or of two hosts that are both this machine."""
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
    """Returns whether one of the addresses belongs to this machine."""
    for ip in ips:
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as own:
            own.bind((ip, 0))
            return True
    return False


def _version_mismatch_error(named: Address, error: Exception) -> ConfigError | None:
    """Returns the error to raise if Ray has refused other versions of Ray or Python. Returns None
    for any other error of Ray's."""
    versions = re.findall(r"^ *(Ray|Python): (\S+)", str(error), re.MULTILINE)
    if [name for name, _ in versions] != ["Ray", "Python"] * 2:
        return None
    cluster = " and ".join(f"{name} {version}" for name, version in versions[:2])
    process = " and ".join(f"{name} {version}" for name, version in versions[2:])
    return ConfigError(
        f"the cluster at {named.shown} has {cluster}, and this process {process}",
        allowed="exactly the same versions",
        fix="install them here, or use --address http://HOST:8265, which runs the command there",
    )
