"""The controller's side of the simulated workers and vaults, for `control_plane`."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.control_words import Decoder, Ears
from benchmarks.control_world import Batch
from rayzero.orchestrator.aio import PendingReplies, WorkerReports
from rayzero.orchestrator.policies.placement import ResourceRequest
from rayzero.workers.messages import GenerationSpec, RankAssignment, WorkerInfo
from rayzero.workers.vault.records import ConnectionLost, SlotInfo


class PaperGroup:
    """The simulated workers and their vaults, as both groups the controller wants.

    Args:
        pipe: takes commands, brings what does not wait behind anybody's words.
        words: what workers say.
    """

    def __init__(self, pipe: Connection, words: Connection) -> None:
        self.answers_s: list[float] = []
        """From each death to the first order that followed it."""
        self.deaths = 0
        self.decoder = Decoder()
        self._pipe = pipe
        self._ears = Ears(words, self.decoder)
        self._news: defaultdict[str, asyncio.Queue[ConnectionLost]] = defaultdict(asyncio.Queue)
        self._came: asyncio.Queue[WorkerInfo] = asyncio.Queue()
        self._numbers = count()
        self._tickets: dict[int, Callable[[Any], Any]] = {}
        self._orders: list[tuple[str, tuple[Any, ...], int | None]] = []
        self._died_s: list[float] = []
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pipe.fileno(), self._read)

    def end(self) -> None:
        self._ears.close()
        self._loop.remove_reader(self._pipe.fileno())
        self._pipe.close()

    async def start_workers(self, need: ResourceRequest) -> tuple[WorkerInfo, ...]:
        return tuple(await self._ask("place"))

    async def next_worker(self) -> WorkerInfo:
        return await self._came.get()

    def replace(self, worker: int, delay_s: float, avoid_nodes: Sequence[str]) -> None:
        self._order("replace", worker)

    def resize(self, least: int, most: int) -> None:
        pass

    async def release_worker(self, worker: int) -> None:
        await self._ask("kill", worker)

    async def kill(self, worker: int) -> None:
        await self._ask("kill", worker)

    async def strike(self, every_s: float) -> None:
        """From now on somebody dies every so often; 0 for nobody any more."""
        await self._ask("strike", every_s)

    async def call(self, target: Any, method: Callable[..., Any], *args: Any) -> Any:
        """A call of a worker or of a node's vault."""
        return await getattr(self, method.__name__)(target, *args)

    def broadcast(
        self, workers: Iterable[int], method: Callable[..., None], *args: Any
    ) -> PendingReplies:
        answers: PendingReplies = getattr(self, method.__name__)(workers, *args)
        return answers

    async def open_store(self, worker: int) -> int:
        return 4000

    def assign(
        self, formation: GenerationSpec, places: Mapping[int, RankAssignment]
    ) -> PendingReplies:
        ranks = {worker: own.rank for worker, own in places.items()}
        return self._tell("assign", ranks, formation.generation, formation.world_size)

    def subscribe(self, workers: Iterable[int]) -> None:
        """All that is said is heard."""
        self._ears.workers += sum(1 for _ in workers)

    async def receive(self) -> WorkerReports:
        return await self._ears.hear()

    async def poll(self, node: str, timeout_s: float) -> list[ConnectionLost]:
        box = self._news[node]
        try:
            async with asyncio.timeout(timeout_s):
                return [await box.get()]
        except TimeoutError:
            return []

    def stop(self, workers: Iterable[int], generation: int) -> PendingReplies:
        return self.fence(workers, generation)

    def fence(self, workers: Iterable[int], generation: int) -> PendingReplies:
        now_s = time.monotonic()
        self.answers_s += [now_s - died_s for died_s in self._died_s]
        self._died_s.clear()
        return self._tell("leave", tuple(workers), generation)

    def drain(self, workers: Iterable[int], generation: int) -> PendingReplies:
        return self._tell("drain", tuple(workers), generation)

    async def draining_nodes(self) -> frozenset[str]:
        return frozenset()

    async def open(self, node_ids: Sequence[str]) -> dict[str, str]:
        return {node: f"/vault/{node}" for node in node_ids}

    async def inventory(self, node_id: str) -> list[SlotInfo]:
        slots: list[SlotInfo] = await self._ask("inventory", node_id)
        return slots

    async def close(self, node_id: str) -> None:
        pass

    async def release(self) -> None:
        pass

    def _read(self) -> None:
        batch: Batch | None = self.decoder.received(self._pipe)
        if batch is not None:
            self._take(batch)

    def _take(self, batch: Batch) -> None:
        for node, news, died_s in batch.news:
            self.deaths += 1
            self._died_s.append(died_s)
            self._news[node].put_nowait(news)
        for info in batch.came:
            self._came.put_nowait(info)
        for ticket, answer in batch.answers:
            self._tickets.pop(ticket)(answer)

    def _tell(self, name: str, workers: Collection[int], *args: Any) -> PendingReplies:
        answers, ticket = PendingReplies(workers), next(self._numbers)
        self._tickets[ticket] = lambda _: answers.mark_done(workers)
        self._order(name, workers, *args, ticket=ticket)
        return answers

    async def _ask(self, name: str, *args: Any) -> Any:
        ticket = next(self._numbers)
        future = self._loop.create_future()
        self._tickets[ticket] = lambda answer: future.done() or future.set_result(answer)
        self._order(name, *args, ticket=ticket)
        return await future

    def _order(self, name: str, *args: Any, ticket: int | None = None) -> None:
        if not self._orders:  # all that is ordered in one turn of the loop goes at once
            self._loop.call_soon(self._send)
        self._orders.append((name, args, ticket))

    def _send(self) -> None:
        orders, self._orders = self._orders, []
        self._pipe.send(orders)
