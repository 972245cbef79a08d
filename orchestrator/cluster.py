"""The Ray cluster a job runs on: the one the user names, or one of our own for the time being."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import ray
from ray._private import services  # finding heads on this machine is nowhere public

from rayzero.engine.errors import ConfigError, first_line
from rayzero.orchestrator.admission import RefusedError, refuse_strangers
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.manners import unchanged

_log = logging.getLogger(__name__)
_OBJECT_STORE_BYTES = 128 * 2**20  # nothing big goes through it
_REACH_S = 5.0


@dataclass(frozen=True)
class Cluster:
    """A connection to Ray.

    Args:
        owned: whether we made the connection, and so close it.
        can_grow: whether waiting for resources can help: not on our own, single-node cluster.
    """

    owned: bool
    can_grow: bool

    @property
    def is_ours(self) -> bool:
        """Whether it was started by this process, and ends with it."""
        return self.owned and not self.can_grow

    def close(self) -> None:
        """Closes what `connect` opened; our own cluster ends with it. Does nothing twice."""
        if self.owned and ray.is_initialized():
            ray.shutdown()


def connect(address: str | None) -> Cluster:
    """Joins the cluster at `address` or RAY_ADDRESS, or else starts one on this machine.

    A process that is connected to Ray already stays where it is.

    Raises:
        ConfigError: there is no cluster at that address.
        JobFailedError: one of our own could not be started.
    """
    if ray.is_initialized():
        return Cluster(owned=False, can_grow=True)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = head_address(address) or "local"
    if address == "local":
        with unchanged():
            _start()
        return Cluster(owned=True, can_grow=False)
    reach(address)
    try:
        with unchanged():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise _other_versions(address, error) or _no_cluster(address, error) from None
    return Cluster(owned=True, can_grow=True)


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


def clusters(address: str | None) -> list[str]:
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


def each(address: str | None) -> Iterator[Cluster]:
    """A connection to one after the other of `clusters`, closed when the next is asked for, but not
    when it is asked no more. Those that were only found and cannot be joined are passed over, as
    long as there are others.

    Raises:
        ConfigError: there is none, or the one that was named cannot be joined.
        RefusedError: none of them lets us in.
    """
    found = clusters(address)
    refused: RefusedError | None = None
    joined = False
    for one in found:
        try:
            cluster = connect(one)
        except ConfigError as error:
            if address is not None or len(found) == 1:
                raise
            refused = error if isinstance(error, RefusedError) else refused
            continue
        joined = True
        yield cluster
        cluster.close()
    if refused is not None and not joined:
        raise refused


def reach(address: str) -> None:
    """Looks whether somebody listens there who lets us in, unless `address` is a word, such as
    `auto`. Ray itself would try for minutes, and could not be interrupted meanwhile.

    Raises:
        ConfigError: nobody does.
        RefusedError: it does not let us in.
    """
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, error) from None
    refuse_strangers(address)


def _no_cluster(address: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"there is no Ray cluster at {address!r}: {first_line(error)}",
        allowed="host:port of a running cluster's head, or `auto`",
        fix="--address or RAY_ADDRESS; without either, a cluster is started on this machine",
    )


def _other_versions(address: str, error: Exception) -> ConfigError | None:
    """Ray's refusal of another Ray or Python, in a line; None for another error."""
    found = re.findall(r"^ *(Ray|Python): (\S+)", str(error), re.MULTILINE)
    if [name for name, _ in found] != ["Ray", "Python"] * 2:
        return None
    there, here = found[:2], found[2:]
    return ConfigError(
        f"the cluster at {address!r} has {_named(there)}, and this process {_named(here)}",
        allowed="the same versions of both, to the last number",
        fix="this environment; or --address http://HOST:8265, by which the command runs there",
    )


def _named(versions: list[tuple[str, str]]) -> str:
    return " and ".join(" ".join(one) for one in versions)


def _start() -> None:
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
