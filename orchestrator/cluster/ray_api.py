"""Auth check, node tables, actor-death errors.

Whether a cluster lets us in, asked before Ray asks: Ray would repeat a refused question for 20 s
and more, and then say that nobody answers.

What Ray knows about the cluster's nodes, in the policies' words.

Every call asks the head once, and blocks for that long: some milliseconds.

How Ray tells that an actor's process is gone.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import state as ray_state  # draining and free resources: no public API
from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled
from ray.exceptions import (
    ActorPlacementGroupRemoved,
    ActorUnschedulableError,
    RayActorError,
    RayError,
)

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.policies.placement import Capacity


class AuthRefusedError(ConfigError):
    """A cluster does not let us in."""


_CHECK_ALIVE_RPC = "/ray.rpc.NodeInfoGcsService/CheckAlive"  # an empty message asks about no node


_AUTH_RPC_TIMEOUT_S = 2.0


def check_auth(address: str) -> None:
    """Asks the head at host:port one small question with the token that Ray would give it. Whatever
    else may be wrong is left to Ray.

    Raises:
        AuthRefusedError: it does not take that token, or that there is none.
    """
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return
    import grpc  # here, because it takes long to import, and `--help` must not wait for it

    headers = get_auth_headers_if_auth_enabled({})
    metadata = tuple((key.lower(), value) for key, value in headers.items())
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(_CHECK_ALIVE_RPC)(
                b"", timeout=_AUTH_RPC_TIMEOUT_S, metadata=metadata
            )
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                return
        else:
            return
    said = "refuses our token" if metadata else "wants a token, and we give none"
    raise AuthRefusedError(
        f"the Ray cluster at {address!r} {said}",
        allowed="the token that its head was started with",
        fix="RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH",
    )


@dataclass(frozen=True)
class NodeTable:
    """The living nodes at one moment.

    Args:
        whole: what each node has, by its id.
        free: what of that nobody has reserved; Ray's own view, late by some tenths of a second.
    """

    capacity: dict[str, Capacity]
    free: dict[str, Capacity]

    @property
    def all_capacities(self) -> list[Capacity]:
        return list(self.capacity.values())

    @property
    def total_free(self) -> Capacity:
        """What is free in the cluster as a whole."""
        free = self.free.values()
        return Capacity(sum(one.cpus for one in free), sum(one.gpus for one in free))


def node_snapshot() -> NodeTable:
    """The nodes as they are now."""
    whole = {
        node["NodeID"]: _to_capacity(node["Resources"])
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    }
    free = ray_state.available_resources_per_node()  # type: ignore[no-untyped-call]
    return NodeTable(whole, {node: _to_capacity(free.get(node, {})) for node in whole})


def alive_node_ids() -> frozenset[str]:
    """The ids of the living nodes."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return frozenset(node["NodeID"] for node in nodes if node["Alive"])


def draining_node_ids() -> frozenset[str]:
    """The ids of the nodes that take nothing new and will go: drained by hand, preempted, idle."""
    return frozenset(ray_state.state.get_draining_nodes())


def _to_capacity(resources: dict[str, float]) -> Capacity:
    return Capacity(resources.get("CPU", 0.0), resources.get("GPU", 0.0))


ACTOR_LOST = (RayActorError, ActorUnschedulableError, ActorPlacementGroupRemoved)
"""What a call to an actor raises whose process or node is gone, or cannot be reached."""

_GONE_TIMEOUT_S = 3.0
"""How long to wait for killed processes to be gone."""


_PING_INTERVAL_S = 0.05

_EXIT_DETAIL = re.compile(r"Worker exit detail: (.*?)(?: Some common causes include|$)")


def death_cause(error: RayError) -> str:
    """What Ray knows about a death, without the identifiers and the advice around it."""
    text = " ".join(line for line in str(error).splitlines() if not line.startswith("\t"))
    found = _EXIT_DETAIL.search(text)
    return found.group(1) if found else text


async def wait_gone(methods: Iterable[Any]) -> None:
    """Returns when none of some killed actors answers any more, or after a while.

    Args:
        methods: a harmless one of each actor.
    """
    waits = [asyncio.ensure_future(_wait_unreachable(method)) for method in methods]
    if waits:
        _, late = await asyncio.wait(waits, timeout=_GONE_TIMEOUT_S)
        for one in late:
            one.cancel()


async def _wait_unreachable(method: Any) -> None:
    try:
        while True:
            await method.remote()
            await asyncio.sleep(_PING_INTERVAL_S)
    except RayError:
        return
