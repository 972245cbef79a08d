"""The worker and vault groups of the controller, backed by simulated workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from ray.exceptions import ActorUnschedulableError

from rayzero.orchestrator.aio import PendingReplies, WorkerReports
from rayzero.orchestrator.cluster.actor_calls import WorkerWatch
from rayzero.orchestrator.cluster.node_links import NodeLink, WorkerMail
from rayzero.orchestrator.errors import VaultLostError
from rayzero.orchestrator.policies.placement import ResourceRequest
from rayzero.workers.agent.link import AgentAddress, Attach
from rayzero.workers.messages import GenerationSpec, RankAssignment, WorkerInfo
from rayzero.workers.vault.records import ConnectionLost, SlotInfo

RAY_DELAY_S = 0.4
"""From a death to Ray's report of it."""


class SimulatedGroup:
    """Implements the interfaces of both the worker group and the vault group.

    Streams, and the code that receives from them, are the real ones.
    """

    attached: tuple[str, ...] = ()

    def __init__(self, port: int, secret: bytes, nodes: int) -> None:
        self.reaction_s: list[float] = []
        """From each fault to the first command after it."""
        self.num_faults = 0
        self._mail = WorkerMail()
        self._watch = WorkerWatch(self._mail, self._wait_end)
        self._ends: dict[int, Future[None]] = {}
        address = AgentAddress("", "127.0.0.1", port, secret)
        names = [f"node-{number}" for number in range(nodes)]
        self._links = {it: NodeLink(address, Attach(0, it.encode()), self._mail) for it in names}
        self._first = self._links[names[0]]
        self._started: asyncio.Queue[WorkerInfo] = asyncio.Queue()
        self._unanswered_faults_s: list[float] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def shut_down(self) -> None:
        self._watch.close()
        for link in self._links.values():
            link.end(VaultLostError("the benchmark has ended"))

    async def start_workers(
        self,
        request: ResourceRequest,
        on_failure: Callable[[Any], None],
        on_waiting: Callable[[str], None],
    ) -> tuple[WorkerInfo, ...]:
        await asyncio.gather(*(link.attached() for link in self._links.values()))
        return tuple(await self._first.call("start"))

    async def next_worker(self) -> WorkerInfo:
        return await self._started.get()

    def replace(self, worker: int, delay_s: float, avoid_nodes: Sequence[str]) -> None:
        self._spawn(self._first.call("replace", worker))

    def resize(self, min_workers: int, max_workers: int) -> None:
        pass

    async def release_worker(self, worker: int) -> None:
        await self._first.call("kill", worker)

    async def kill(self, worker: int) -> None:
        await self._first.call("kill", worker)

    async def inject_faults(self, interval_s: float) -> None:
        """Kill a random worker at every interval; 0 to stop."""
        await self._first.call("inject_faults", interval_s)

    async def call(self, target: Any, method: Callable[..., Any], *args: Any) -> Any:
        """Call a worker or the vault of a node."""
        return await getattr(self, method.__name__)(target, *args)

    def broadcast(
        self, workers: Iterable[int], method: Callable[..., None], *args: Any
    ) -> PendingReplies:
        replies: PendingReplies = getattr(self, method.__name__)(workers, *args)
        return replies

    async def open_store(self, worker: int) -> int:
        return 4000

    def assign(
        self, spec: GenerationSpec, assignments: Mapping[int, RankAssignment]
    ) -> PendingReplies:
        ranks = {worker: assignment.rank for worker, assignment in assignments.items()}
        if spec.is_ahead:
            return self._broadcast("prepare", ranks, spec.generation)
        return self._broadcast("assign", ranks, spec.generation, spec.world_size)

    def subscribe(self, workers: Iterable[int]) -> None:
        self._watch.subscribe(workers)

    async def receive(self) -> WorkerReports:
        return await self._watch.receive()

    async def events(self, node: str) -> list[ConnectionLost]:
        faults: list[ConnectionLost] = []
        for event in await self._links[node].events():
            if isinstance(event, WorkerInfo):
                self._started.put_nowait(event)
                continue
            lost, fault_s = event
            self.num_faults += 1
            self._unanswered_faults_s.append(fault_s)
            faults.append(lost)
            asyncio.get_running_loop().call_later(RAY_DELAY_S, self._end, lost.worker)
        return faults

    def stop(self, workers: Iterable[int], generation: int) -> PendingReplies:
        return self.fence(workers, generation)

    def fence(self, workers: Iterable[int], generation: int) -> PendingReplies:
        now_s = time.monotonic()
        self.reaction_s += [now_s - fault_s for fault_s in self._unanswered_faults_s]
        self._unanswered_faults_s.clear()
        return self._broadcast("leave", tuple(workers), generation)

    def drain(self, workers: Iterable[int], generation: int) -> PendingReplies:
        return self._broadcast("drain", tuple(workers), generation)

    async def draining_nodes(self) -> frozenset[str]:
        return frozenset()

    async def open(self, node_ids: Sequence[str]) -> dict[str, str]:
        return {node: f"/vault/{node}" for node in node_ids}

    async def inventory(self, node_id: str) -> list[SlotInfo]:
        slots: list[SlotInfo] = await self._first.call("inventory", node_id)
        return slots

    async def close(self, node_id: str) -> None:
        pass

    async def release(self) -> None:
        pass

    def _wait_end(self, worker: int) -> Any:
        """The reference of a call that ends with the worker."""
        self._ends[worker] = future = Future()
        return SimpleNamespace(future=lambda: future)

    def _end(self, worker: int) -> None:
        """Ray reports a worker's death."""
        self._ends.pop(worker).set_exception(ActorUnschedulableError("it was killed"))

    def _broadcast(self, name: str, workers: Collection[int], *args: Any) -> PendingReplies:
        replies = PendingReplies(workers)

        async def call() -> None:
            await self._first.call(name, workers, *args)
            replies.mark_done(tuple(workers))

        self._spawn(call())
        return replies

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
