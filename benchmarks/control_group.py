"""The controller's side of the simulated workers and vaults, for `control_plane`."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.control_world import Batch
from rayzero.orchestrator.group import WorkerLostError
from rayzero.orchestrator.policies.placement import Need
from rayzero.workers.messages import Assign, SlotInfo, WorkerInfo


class PaperGroup:
    """The simulated workers and their vaults, as both groups the controller wants."""

    def __init__(self, pipe: Connection) -> None:
        self.answers_s: list[float] = []
        """From each death to the first order that followed it."""
        self.deaths = 0
        self._pipe = pipe
        self._said: defaultdict[Any, asyncio.Queue[Any]] = defaultdict(asyncio.Queue)
        self._numbers = count()
        self._tickets: dict[int, asyncio.Future[Any]] = {}
        self._orders: list[tuple[str, tuple[Any, ...], int | None]] = []
        self._died_s: list[float] = []
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pipe.fileno(), self._read)

    def end(self) -> None:
        self._loop.remove_reader(self._pipe.fileno())
        self._pipe.close()

    async def place(self, need: Need) -> tuple[WorkerInfo, ...]:
        return tuple(await self._ask("place"))

    async def next_worker(self) -> WorkerInfo:
        came: WorkerInfo = await self._said["came"].get()
        return came

    def replace(self, worker: int, delay_s: float, avoid_nodes: Sequence[str]) -> None:
        self._order("replace", worker)

    def resize(self, least: int, most: int) -> None:
        pass

    async def dismiss(self, worker: int) -> None:
        await self._ask("kill", worker)

    async def kill(self, worker: int) -> None:
        await self._ask("kill", worker)

    def strike(self, every_s: float) -> None:
        """From now on somebody dies every so often."""
        self._order("strike", every_s)

    async def open_store(self, worker: int) -> int:
        return 4000

    async def assign(self, worker: int, assign: Assign) -> None:
        await self._ask("assign", worker, assign.generation, assign.rank, assign.world_size)

    async def poll(self, key: Any, timeout_s: float) -> Any:
        box = self._said[key]
        if box.empty():
            try:
                async with asyncio.timeout(timeout_s):
                    said = await box.get()
            except TimeoutError:
                return []
        else:
            said = box.get_nowait()
        if isinstance(said, WorkerLostError):
            raise said
        return said

    async def stop(self, worker: int, generation: int) -> None:
        await self.fence(worker, generation)

    async def fence(self, worker: int, generation: int) -> None:
        now_s = time.monotonic()
        self.answers_s += [now_s - died_s for died_s in self._died_s]
        self._died_s.clear()
        await self._ask("leave", worker, generation)

    async def drain(self, worker: int, generation: int) -> None:
        await self._ask("drain", worker, generation)

    async def leaving_nodes(self) -> frozenset[str]:
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
        try:
            batch: Batch = self._pipe.recv()
        except EOFError:
            return
        for worker, messages in batch.said:
            self._said[worker].put_nowait(messages)
        for node, news in batch.news:
            self._said[node].put_nowait([news])
        for worker, died_s in batch.lost:
            self.deaths += 1
            self._died_s.append(died_s)
            self._said[worker].put_nowait(WorkerLostError("it was killed"))
        for info in batch.came:
            self._said["came"].put_nowait(info)
        for ticket, answer in batch.answers:
            if not (waiting := self._tickets.pop(ticket)).done():
                waiting.set_result(answer)

    async def _ask(self, name: str, *args: Any) -> Any:
        ticket = next(self._numbers)
        future = self._loop.create_future()
        self._tickets[ticket] = future
        self._order(name, *args, ticket=ticket)
        return await future

    def _order(self, name: str, *args: Any, ticket: int | None = None) -> None:
        if not self._orders:  # all that is ordered in one turn of the loop goes at once
            self._loop.call_soon(self._send)
        self._orders.append((name, args, ticket))

    def _send(self) -> None:
        orders, self._orders = self._orders, []
        self._pipe.send(orders)
