"""The vaults of a job: Ray actors, one on every node with a worker."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar, TypeVarTuple

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayzero.orchestrator.cluster.ray_api import ACTOR_LOST, death_cause, wait_gone
from rayzero.orchestrator.errors import JobFailedError, VaultLostError
from rayzero.workers.chaos.node import network_id
from rayzero.workers.chaos.spec import FaultSpec
from rayzero.workers.lifetimes import NAMESPACE, VAULT, Owned, owned_name
from rayzero.workers.messages import WorkerSpec
from rayzero.workers.vault.actor import VAULT_COMMAND_THREADS, VaultActor

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_START_TIMEOUT_S = 60.0


class VaultGroup:
    """One vault for each node; owned from `start` or `open` until `release`. Used from one event
    loop. Calls that name a node may raise VaultLostError.

    A lost vault is removed, so that the next `open` starts another one on its node.

    Args:
        orphan_s: as of `OrphanWatch`, also for workers.
    """

    def __init__(self, spec: WorkerSpec, orphan_s: float = 0.0) -> None:
        self._spec = spec
        self.orphan_s = orphan_s
        self._faults = spec.faults
        self._actor = ray.remote(VaultActor)
        self._vaults: dict[str, Any] = {}
        self.attached: tuple[str, ...] = ()
        """The nodes of the vaults that an earlier process has started."""
        self._shared_peers: dict[str, Any] = {}
        self._health_limit_s: float | None = None

    def check_nodes(self, limit_s: float) -> None:
        """Makes each vault that starts later begin with a check of its node."""
        self._health_limit_s = limit_s

    async def attach(self, vaults: Iterable[Owned]) -> None:
        """Takes over those of these vaults that answer, which an earlier process of the job has
        started."""
        found: dict[str, Any] = {}
        for vault in vaults:
            with suppress(ValueError):  # it has ended
                found[vault.what.removeprefix(VAULT).rpartition("-")[0]] = vault.actor()
        answers = [asyncio.wait_for(it.address.remote(), _START_TIMEOUT_S) for it in found.values()]
        replies = await asyncio.gather(*answers, return_exceptions=True)
        for (node, actor), reply in zip(found.items(), replies, strict=True):
            if isinstance(reply, str):
                self._vaults[node] = actor
            else:
                ray.kill(actor)
        self.attached = tuple(self._vaults)

    def start(self, node_id: str) -> None:
        """Starts a vault on a node that has none, without waiting for it."""
        if node_id in self._vaults:
            return
        spec, what = self._spec, f"{VAULT}{node_id}-{secrets.token_hex(4)}"
        actor = self._actor.options(
            name=owned_name(spec.name, spec.run, what),
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            max_concurrency=VAULT_COMMAND_THREADS,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        self._vaults[node_id] = actor.remote(
            spec.name,
            node_id,
            self._faults,
            spec.output_dir,
            self.orphan_s,
            self._health_limit_s,
        )

    async def open(self, node_ids: Sequence[str]) -> dict[str, str]:
        """Starts a vault on each of these nodes that has none; the addresses by node. Raises
        JobFailedError if one did not start."""
        nodes = list(dict.fromkeys(node_ids))
        starts = asyncio.gather(*(self._start_and_wait(node) for node in nodes))
        try:
            addresses = await asyncio.wait_for(starts, _START_TIMEOUT_S)
        except TimeoutError:
            raise JobFailedError(
                f"the vaults' processes did not start within {_START_TIMEOUT_S:g} s",
                allowed="one actor with num_cpus=0 on every node of the job",
            ) from None
        await self._share_peers()
        return dict(zip(nodes, addresses, strict=True))

    async def call(self, node_id: str, method: Callable[[Any, *Ts], T], *args: *Ts) -> T:
        """Calls `method`, one of `Vault`, in a node's vault, and raises what it raises;
        VaultLostError if the vault's process or its node is gone."""
        if node_id not in self._vaults:
            raise VaultLostError(f"node {node_id} has no vault")
        actor = self._vaults[node_id]
        try:
            reply: T = await getattr(actor, method.__name__).remote(*args)
            return reply
        except ACTOR_LOST as error:
            if node_id in self._vaults and self._vaults[node_id] is actor:
                del self._vaults[node_id]
                ray.kill(actor)  # it may live: Ray could not reach it for a while
            raise VaultLostError(death_cause(error)) from None

    async def inject_faults(self, faults: Sequence[FaultSpec]) -> None:
        """Replaces the faults that were injected since the job started, in every vault, also in
        those that start later."""
        in_effect = self._faults = (*self._spec.faults, *faults)
        calls = [self.call(node, VaultActor.inject, in_effect) for node in self._vaults]
        for reply in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(reply, BaseException) and not isinstance(reply, VaultLostError):
                raise reply

    async def why_not_injectable(self, node_id: str, fault: FaultSpec) -> str:
        """Why a fault of a vault or a node is impossible there; empty if it is possible."""
        is_local = node_id == ray.get_runtime_context().get_node_id()
        return await self.call(
            node_id, VaultActor.why_not_injectable, fault, is_local, network_id()
        )

    async def inject_node_fault(self, node_id: str, fault: FaultSpec) -> None:
        """Injects a fault of a vault or a node, which usually ends the process that would reply."""
        await self.call(node_id, VaultActor.inject_node_fault, fault)

    async def close(self, node_id: str) -> None:
        """Ends a node's vault, if it has one. Ray's autoscaler keeps a node with a vault alive."""
        actor = self._vaults.pop(node_id, None)
        if actor is not None:
            ray.kill(actor)
            await wait_gone([actor.usage])

    async def release(self) -> None:
        """Ends all vaults. May be called at any time, repeatedly."""
        actors = list(self._vaults.values())
        self._vaults, self._shared_peers = {}, {}
        for actor in actors:
            ray.kill(actor)
        await wait_gone(actor.usage for actor in actors)

    async def _start_and_wait(self, node_id: str, retry: bool = True) -> str:
        """The address of a node's vault. A lost one is started again, once."""
        self.start(node_id)
        try:
            return await self.call(node_id, VaultActor.address)
        except VaultLostError:
            if not retry:
                raise
            return await self._start_and_wait(node_id, retry=False)
        except RayError as error:
            raise JobFailedError(f"a vault could not start: {death_cause(error)}") from None

    async def _share_peers(self) -> None:
        """Gives every vault the handles of the others, if they have changed since last time."""
        vaults = dict(self._vaults)
        if vaults == self._shared_peers:
            return
        calls = []
        for node in vaults:
            peers = {peer: vault for peer, vault in vaults.items() if peer != node}
            calls.append(self.call(node, VaultActor.set_peers, peers))
        for reply in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(reply, BaseException):
                raise reply
        self._shared_peers = vaults
