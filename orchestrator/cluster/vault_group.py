"""The vaults of a job as Ray actors, one on every node that has a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayzero.orchestrator.cluster.ray_api import ACTOR_LOST, death_cause, wait_gone
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.interfaces import VaultLostError
from rayzero.workers.chaos.node import network_id
from rayzero.workers.vault.actor import VAULT_COMMAND_THREADS, VaultActor
from rayzero.workers.vault.records import RankFile, SlotInfo, SlotRef, VaultEvent

_START_TIMEOUT_S = 60.0


class RayVaultGroup:
    """Owns the vaults, from `begin` or `open` to `release`. Used from one event loop.

    A vault that was found lost is forgotten, so that the next `open` starts another one.

    Args:
        job: the job's name.
        actor: the class of the vaults.
        faults: of the job, to inject in what the vaults do.
        output_dir: where those are recorded that happened.
    """

    def __init__(
        self,
        job: str,
        actor: type[Any] = VaultActor,
        faults: Sequence[str] = (),
        output_dir: str = "",
    ) -> None:
        self._job = job
        self._faults = tuple(faults)
        self._injected_faults: tuple[str, ...] = ()
        self._output_dir = output_dir
        self._actor = ray.remote(actor)
        self._vaults: dict[str, Any] = {}
        self._shared_peers: dict[str, Any] = {}

    def start(self, node_id: str) -> None:
        """Starts a node's vault, if it has none, without waiting for it."""
        if node_id in self._vaults:
            return
        here = NodeAffinitySchedulingStrategy(node_id, soft=False)
        actor = self._actor.options(
            num_cpus=0,
            max_concurrency=VAULT_COMMAND_THREADS,
            max_restarts=0,
            scheduling_strategy=here,
        )
        faults = (*self._faults, *self._injected_faults)
        self._vaults[node_id] = actor.remote(self._job, node_id, faults, self._output_dir)

    async def open(self, node_ids: Sequence[str]) -> dict[str, str]:
        nodes = list(dict.fromkeys(node_ids))
        answers = asyncio.gather(*(self._open_address(node) for node in nodes))
        try:
            addresses = await asyncio.wait_for(answers, _START_TIMEOUT_S)
        except TimeoutError:
            raise JobFailedError(
                f"the vaults' processes did not answer within {_START_TIMEOUT_S:g} s",
                allowed="a process without CPUs of its own on every node of the job",
            ) from None
        await self._share_peers()
        return dict(zip(nodes, addresses, strict=True))

    async def poll(self, node_id: str, timeout_s: float) -> list[VaultEvent]:
        news: list[VaultEvent] = await self._call(node_id, "poll", timeout_s)
        return news

    async def inventory(self, node_id: str) -> list[SlotInfo]:
        slots: list[SlotInfo] = await self._call(node_id, "inventory")
        return slots

    async def unpin(self, node_id: str, generation: int, step: int) -> None:
        await self._call(node_id, "unpin", generation, step)

    async def replicate(self, node_id: str, slots: Sequence[SlotRef]) -> int:
        return int(await self._call(node_id, "replicate", tuple(slots)))

    async def write(self, node_id: str, folder: str, slots: Sequence[SlotRef]) -> list[RankFile]:
        files: list[RankFile] = await self._call(node_id, "write", folder, tuple(slots))
        return files

    async def inspect(self, node_id: str, pid: int) -> str:
        return str(await self._call(node_id, "inspect", pid))

    async def usage(self, node_id: str) -> dict[str, Any]:
        usage: dict[str, Any] = await self._call(node_id, "usage")
        return usage

    async def kill(self, node_id: str, pid: int) -> bool:
        """Ends a worker's process on that node (SIGKILL); False if the vault does not know it."""
        return bool(await self._call(node_id, "kill", pid))

    async def inject_faults(self, faults: Sequence[str]) -> None:
        self._injected_faults = tuple(faults)
        told = [self._call(node, "inject", (*self._faults, *faults)) for node in self._vaults]
        for answer in await asyncio.gather(*told, return_exceptions=True):
            if isinstance(answer, BaseException) and not isinstance(answer, VaultLostError):
                raise answer

    async def why_not_injectable(self, node_id: str, fault: str) -> str:
        is_here = node_id == ray.get_runtime_context().get_node_id()
        return str(await self._call(node_id, "why_not_injectable", fault, is_here, network_id()))

    async def inject_node_fault(self, node_id: str, fault: str) -> None:
        await self._call(node_id, "inject_node_fault", fault)

    async def close(self, node_id: str) -> None:
        actor = self._vaults.pop(node_id, None)
        if actor is not None:
            ray.kill(actor)
            await wait_gone([actor.usage])

    async def release(self) -> None:
        actors = list(self._vaults.values())
        self._vaults, self._shared_peers = {}, {}
        for actor in actors:
            ray.kill(actor)
        await wait_gone(actor.usage for actor in actors)

    async def _open_address(self, node_id: str) -> str:
        """The address of a node's vault; one that turns out to be lost is started again, once."""
        try:
            return await self._start_and_wait(node_id)
        except VaultLostError:
            return await self._start_and_wait(node_id)

    async def _start_and_wait(self, node_id: str) -> str:
        self.start(node_id)
        try:
            return str(await self._call(node_id, "address"))
        except RayError as error:
            raise JobFailedError(f"a vault could not start: {death_cause(error)}") from None

    async def _share_peers(self) -> None:
        """Gives every vault the handles of the others, when there are others than last time."""
        everyone = dict(self._vaults)
        if everyone == self._shared_peers:
            return
        others = {node: {n: v for n, v in everyone.items() if n != node} for node in everyone}
        meetings = [self._call(node, "set_peers", others[node]) for node in everyone]
        for lost in await asyncio.gather(*meetings, return_exceptions=True):
            if isinstance(lost, BaseException):
                raise lost
        self._shared_peers = everyone

    async def _call(self, node_id: str, method: str, *args: Any) -> Any:
        if node_id not in self._vaults:
            raise VaultLostError(f"node {node_id} has no vault")
        actor = self._vaults[node_id]
        try:
            return await getattr(actor, method).remote(*args)
        except ACTOR_LOST as error:
            if node_id in self._vaults and self._vaults[node_id] is actor:
                del self._vaults[node_id]
                ray.kill(actor)  # Ray also gives up what it cannot reach for a while
            raise VaultLostError(death_cause(error)) from None
