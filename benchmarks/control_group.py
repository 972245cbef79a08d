"""The worker and vault groups of the controller, backed by simulated workers."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.control_cluster import EventBatch
from benchmarks.control_reports import Decoder, ReportReceiver
from rayzero.orchestrator.aio import PendingReplies, WorkerReports
from rayzero.orchestrator.policies.placement import ResourceRequest
from rayzero.workers.messages import GenerationSpec, RankAssignment, WorkerInfo
from rayzero.workers.vault.records import ConnectionLost, SlotInfo


class SimulatedGroup:
    """Implements the interfaces of both the worker group and the vault group.

    Args:
        pipe: for commands, their replies and events.
        reports: for workers' messages.
    """

    def __init__(self, pipe: Connection, reports: Connection) -> None:
        self.reaction_s: list[float] = []
        """From each fault to the first command after it."""
        self.num_faults = 0
        self.decoder = Decoder()
        self._pipe = pipe
        self._receiver = ReportReceiver(reports, self.decoder)
        self._vault_events: defaultdict[str, asyncio.Queue[ConnectionLost]] = defaultdict(
            asyncio.Queue
        )
        self._started: asyncio.Queue[WorkerInfo] = asyncio.Queue()
        self._request_ids = count()
        self._callbacks: dict[int, Callable[[Any], Any]] = {}
        self._commands: list[tuple[str, tuple[Any, ...], int | None]] = []
        self._unanswered_faults_s: list[float] = []
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pipe.fileno(), self._read)

    def shut_down(self) -> None:
        self._receiver.close()
        self._loop.remove_reader(self._pipe.fileno())
        self._pipe.close()

    async def start_workers(
        self,
        request: ResourceRequest,
        on_failure: Callable[[Any], None],
        on_waiting: Callable[[str], None],
    ) -> tuple[WorkerInfo, ...]:
        return tuple(await self._call("start"))

    async def next_worker(self) -> WorkerInfo:
        return await self._started.get()

    def replace(self, worker: int, delay_s: float, avoid_nodes: Sequence[str]) -> None:
        self._enqueue("replace", worker)

    def resize(self, min_workers: int, max_workers: int) -> None:
        pass

    async def release_worker(self, worker: int) -> None:
        await self._call("kill", worker)

    async def kill(self, worker: int) -> None:
        await self._call("kill", worker)

    async def inject_faults(self, interval_s: float) -> None:
        """Kill a random worker at every interval; 0 to stop."""
        await self._call("inject_faults", interval_s)

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
        return self._broadcast("assign", ranks, spec.generation, spec.world_size)

    def subscribe(self, workers: Iterable[int]) -> None:
        """All messages are received; only the number of workers matters."""
        self._receiver.num_workers += sum(1 for _ in workers)

    async def receive(self) -> WorkerReports:
        return await self._receiver.receive()

    async def poll(self, node: str, timeout_s: float) -> list[ConnectionLost]:
        queue = self._vault_events[node]
        try:
            async with asyncio.timeout(timeout_s):
                return [await queue.get()]
        except TimeoutError:
            return []

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
        slots: list[SlotInfo] = await self._call("inventory", node_id)
        return slots

    async def close(self, node_id: str) -> None:
        pass

    async def release(self) -> None:
        pass

    def _read(self) -> None:
        batch: EventBatch | None = self.decoder.receive(self._pipe)
        if batch is not None:
            self._dispatch(batch)

    def _dispatch(self, batch: EventBatch) -> None:
        for node, event, fault_s in batch.faults:
            self.num_faults += 1
            self._unanswered_faults_s.append(fault_s)
            self._vault_events[node].put_nowait(event)
        for info in batch.started:
            self._started.put_nowait(info)
        for request_id, reply in batch.replies:
            self._callbacks.pop(request_id)(reply)

    def _broadcast(self, name: str, workers: Collection[int], *args: Any) -> PendingReplies:
        replies, request_id = PendingReplies(workers), next(self._request_ids)
        self._callbacks[request_id] = lambda _: replies.mark_done(workers)
        self._enqueue(name, workers, *args, request_id=request_id)
        return replies

    async def _call(self, name: str, *args: Any) -> Any:
        request_id = next(self._request_ids)
        future = self._loop.create_future()
        self._callbacks[request_id] = lambda reply: future.done() or future.set_result(reply)
        self._enqueue(name, *args, request_id=request_id)
        return await future

    def _enqueue(self, name: str, *args: Any, request_id: int | None = None) -> None:
        if not self._commands:  # commands of one event loop iteration are sent together
            self._loop.call_soon(self._send)
        self._commands.append((name, args, request_id))

    def _send(self) -> None:
        commands, self._commands = self._commands, []
        self._pipe.send(commands)
