"""The worker and vault groups of the controller, backed by simulated workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.control_cluster import CONTROLLER
from rayzero.orchestrator.aio import PendingReplies, WorkerReports
from rayzero.orchestrator.cluster.node_links import NodeLink, WorkerMail
from rayzero.orchestrator.cluster.worker_commands import Call, WorkerCommands
from rayzero.orchestrator.cluster.worker_watch import WorkerWatch
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
        self._links: dict[str, NodeLink] = {}
        self._commands = WorkerCommands(CONTROLLER, self._links.get)
        self._mail.on_answer = self._commands.on_answer
        self._nodes: dict[int, str] = {}
        self._dead: set[int] = set()
        self._watch = WorkerWatch(
            self._mail, self._commands, self._nodes.__getitem__, self._find_cause
        )
        address = AgentAddress("", "127.0.0.1", port, secret)
        names = [f"node-{number}" for number in range(nodes)]
        for name in names:
            attach, on_news = Attach(0, name.encode()), partial(self._on_news, name)
            self._links[name] = NodeLink(address, attach, self._mail, on_news)
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
        workers = tuple(await self._first.call("start"))
        self._nodes |= {worker.index: worker.node_id for worker in workers}
        return workers

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
        if target in self._links:
            return await getattr(self, method.__name__)(target, *args)
        call = Call(method.__name__, args, in_order=False)
        return await self._commands.call(target, self._nodes[target], call)

    def broadcast(
        self, workers: Iterable[int], method: Callable[..., None], *args: Any
    ) -> PendingReplies:
        if method.__name__ in ("stop", "fence"):
            now_s = time.monotonic()
            self.reaction_s += [now_s - fault_s for fault_s in self._unanswered_faults_s]
            self._unanswered_faults_s.clear()
        return self._watch.broadcast(workers, Call(method.__name__, args, in_order=True))

    def assign(
        self, spec: GenerationSpec, assignments: Mapping[int, RankAssignment]
    ) -> PendingReplies:
        own = {worker: (assignment,) for worker, assignment in assignments.items()}
        return self._watch.broadcast(assignments, Call("assign", (spec,), in_order=True, own=own))

    def subscribe(self, workers: Iterable[int]) -> None:
        self._watch.subscribe(workers)

    async def receive(self) -> WorkerReports:
        return await self._watch.receive()

    async def events(self, node: str, limit_s: float) -> list[ConnectionLost]:
        faults: list[ConnectionLost] = []
        for event in await self._links[node].events(limit_s):
            if isinstance(event, WorkerInfo):
                self._nodes[event.index] = event.node_id
                self._started.put_nowait(event)
                continue
            lost, fault_s = event
            self._dead.add(lost.worker)
            self.num_faults += 1
            self._unanswered_faults_s.append(fault_s)
            faults.append(lost)
        return faults

    async def draining_nodes(self) -> frozenset[str]:
        return frozenset()

    async def leave_nodes(self, draining: frozenset[str]) -> None: ...

    async def open(self, node_ids: Sequence[str]) -> dict[str, str]:
        return {node: f"/vault/{node}" for node in node_ids}

    async def inventory(self, node_id: str) -> list[SlotInfo]:
        slots: list[SlotInfo] = await self._first.call("inventory", node_id)
        return slots

    async def runs(self, node_id: str, pid: int) -> bool:
        return False  # `kill` has ended it

    async def inspect(self, node_id: str, pid: int) -> str:
        return ""

    async def unpin(self, node_id: str, generation: int, step: int) -> None:
        pass

    async def close(self, node_id: str) -> None:
        pass

    async def release(self) -> None:
        pass

    def _on_news(self, node: str, events: list[Any]) -> None:
        self._commands.on_news(node, [it[0] for it in events if not isinstance(it, WorkerInfo)])

    async def _find_cause(self, worker: int) -> str:
        """Waits until Ray reports a worker's death."""
        while worker not in self._dead:
            await asyncio.sleep(RAY_DELAY_S)
        return "it was killed"

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
