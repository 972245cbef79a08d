"""Connect / start, find clusters, signals and printing.

The Ray cluster a job runs on: the one the user names, or one of our own for the time being.

What Ray does to a process that connects, and is undone: its printing, its way with SIGTERM.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

import ray

# Finding heads on this machine, and the error printer, have no public API.
from ray._private import services, worker

from rayzero.engine.errors import ConfigError, first_line
from rayzero.orchestrator.cluster.ray_api import AuthRefusedError, check_auth
from rayzero.orchestrator.errors import JobFailedError


@contextmanager
def preserve_process_state() -> Iterator[None]:
    """Around a connection to Ray, when it is ours: the process behaves afterwards as before.

    - Ray prints the cluster's errors to stdout, whatever `log_to_driver` says. Those of a job are
      told by the job, in its words and where it is followed.
    - Ray's native code takes SIGTERM over: it would print a stack and end the process at once. Who
      had no handler gets a SystemExit in the main thread, so that `finally` and `atexit` have their
      turn.
    """
    ours = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if ours else None
    try:
        yield
        _stop_error_printer()
        before = _exit_on_sigterm if before is signal.SIG_DFL else before
    finally:
        if before is not None:  # else it is another thread's, or a handler that is not Python's
            signal.signal(signal.SIGTERM, before)


def _stop_error_printer() -> None:
    """Ends the thread that prints. Ray's own disconnecting does the same once more."""
    with suppress(AttributeError):  # another Ray may keep them elsewhere: then it prints
        worker.global_worker.threads_stopped.set()
        worker.global_worker.gcs_error_subscriber.close()  # type: ignore[attr-defined]


def _exit_on_sigterm(number: int, frame: FrameType | None) -> None:
    del frame
    raise SystemExit(128 + number)


_log = logging.getLogger(__name__)


_OBJECT_STORE_BYTES = 128 * 2**20  # nothing big goes through it


_CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ClusterConnection:
    """A connection to Ray.

    Args:
        owned: whether we made the connection, and so close it.
        can_grow: whether waiting for resources can help: not on our own, single-node cluster.
    """

    owned: bool
    can_grow: bool

    @property
    def is_local(self) -> bool:
        """Whether it was started by this process, and ends with it."""
        return self.owned and not self.can_grow

    def close(self) -> None:
        """Closes what `connect` opened; our own cluster ends with it. Does nothing twice."""
        if self.owned and ray.is_initialized():
            ray.shutdown()


def connect(address: str | None) -> ClusterConnection:
    """Joins the cluster at `address` or RAY_ADDRESS, or else starts one on this machine.

    A process that is connected to Ray already stays where it is.

    Raises:
        ConfigError: there is no cluster at that address.
        JobFailedError: one of our own could not be started.
    """
    if ray.is_initialized():
        return ClusterConnection(owned=False, can_grow=True)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = head_address(address) or "local"
    if address == "local":
        with preserve_process_state():
            _start_local_cluster()
        return ClusterConnection(owned=True, can_grow=False)
    check_reachable(address)
    try:
        with preserve_process_state():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise _version_mismatch_error(address, error) or _no_cluster_error(address, error) from None
    return ClusterConnection(owned=True, can_grow=True)


def head_address(address: str | None) -> str:
    """Where the cluster's head is by the user's word: `address`, or else RAY_ADDRESS, or empty.

    Raises:
        ConfigError: it is an address of another kind.
    """
    address = address or os.environ.get("RAY_ADDRESS") or ""
    if address.startswith("ray://"):
        raise ConfigError(
            f"address {address!r} is Ray's client protocol",
            allowed="host:port of a cluster this machine is part of, or `auto`",
            fix="`ray job submit --address http://HOST:8265 -- rayzero run job.yaml` from outside",
        )
    return address


def find_clusters(address: str | None) -> list[str]:
    """The address of the cluster at `address` or RAY_ADDRESS; without either, of every cluster
    whose head runs on this machine. A process that is connected to Ray looks nowhere else.

    Raises:
        ConfigError: there is none.
    """
    if ray.is_initialized():
        return ["auto"]
    named = head_address(address)
    if named not in ("", "auto", "local"):
        return [named]
    found: set[str] = services.find_gcs_addresses()  # type: ignore[no-untyped-call]
    if not found:
        raise ConfigError(
            "no Ray cluster runs on this machine",
            allowed="the machine that a job was started on, or the address of its cluster",
            fix="--address or RAY_ADDRESS: host:port of the cluster's head",
        )
    return sorted(found)


def connect_each(address: str | None) -> Iterator[ClusterConnection]:
    """A connection to one after the other of `clusters`, closed when the next is asked for, but not
    when it is asked no more. Those that were only found and cannot be joined are passed over, as
    long as there are others.

    Raises:
        ConfigError: there is none, or the one that was named cannot be joined.
        AuthRefusedError: none of them lets us in.
    """
    found = find_clusters(address)
    refused: AuthRefusedError | None = None
    joined = False
    for one in found:
        try:
            cluster = connect(one)
        except ConfigError as error:
            if address is not None or len(found) == 1:
                raise
            refused = error if isinstance(error, AuthRefusedError) else refused
            continue
        joined = True
        yield cluster
        cluster.close()
    if refused is not None and not joined:
        raise refused


def check_reachable(address: str) -> None:
    """Looks whether somebody listens there who lets us in, unless `address` is a word, such as
    `auto`. Ray itself would try for minutes, and could not be interrupted meanwhile.

    Raises:
        ConfigError: nobody does.
        AuthRefusedError: it does not let us in.
    """
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
        allowed="host:port of a running cluster's head, or `auto`",
        fix="--address or RAY_ADDRESS; without either, a cluster is started on this machine",
    )


def _version_mismatch_error(address: str, error: Exception) -> ConfigError | None:
    """Ray's refusal of another Ray or Python, in a line; None for another error."""
    found = re.findall(r"^ *(Ray|Python): (\S+)", str(error), re.MULTILINE)
    if [name for name, _ in found] != ["Ray", "Python"] * 2:
        return None
    there, here = found[:2], found[2:]
    return ConfigError(
        f"the cluster at {address!r} has {_format_versions(there)}, and this process {_format_versions(here)}",
        allowed="the same versions of both, to the last number",
        fix="this environment; or --address http://HOST:8265, by which the command runs there",
    )


def _format_versions(versions: list[tuple[str, str]]) -> str:
    return " and ".join(" ".join(one) for one in versions)


def _start_local_cluster() -> None:
    """Our own cluster listens on the loopback interface only and ends with this process.

    Ray turns authentication on when it finds a token in the user's home; workers of a cluster
    that nobody else can reach do without, whatever lies there.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    for tries_left in (2, 1, 0):
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=_OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
            )
            return
        except Exception as error:  # noqa: BLE001  # Ray raises plain ones: a slow start, a full disk
            ray.shutdown()  # whatever did start; what it does not know of ends with this process
            seen = first_line(error)
            if tries_left and "timed out" in seen:
                # Ray gives itself 30 s, which a machine with other work exceeds now and then.
                _log.warning("Ray did not start, and is started again: %s", seen)
                continue
            raise JobFailedError(
                f"a Ray cluster could not be started on this machine: {seen}",
                allowed="some seconds of a core, and room in /tmp and /dev/shm",
                fix="`rayzero doctor` says what is missing; or a cluster that runs: --address",
            ) from None
