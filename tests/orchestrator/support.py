"""What the tests of the orchestrator share: turned time, workers that do as told, a notebook."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from rayzero.engine.validation import validated
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.group import WorkerLostError
from rayzero.orchestrator.notices import Notice
from rayzero.orchestrator.plan import JobPlan, make_plan
from rayzero.orchestrator.policies.placement import Need
from rayzero.orchestrator.spec import JobSpec
from rayzero.workers.messages import Assign, Message, WorkerInfo

N = TypeVar("N")


class VirtualClock:
    """Stands still until it is turned."""

    def __init__(self) -> None:
        self._now = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = count()

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), woken))
        await woken

    async def turn(self, seconds: float) -> None:
        """Lets that much time pass, sleeper by sleeper, and everything happen that follows."""
        until = self._now + seconds
        await settle()
        while self._sleepers and self._sleepers[0][0] <= until:
            self._now, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)
            await settle()
        self._now = until


async def settle() -> None:
    """Lets everything run that can run without time passing."""
    for _ in range(50):
        await asyncio.sleep(0)


class FakeGroup:
    """Workers that say what the test lets them say, and record what they were told."""

    def __init__(self, size: int = 2, node_of: Callable[[int], str] = lambda _: "a") -> None:
        self.infos = tuple(
            WorkerInfo(i, node_of(i), f"host-{node_of(i)}", f"10.0.0.{i}", 100 + i)
            for i in range(size)
        )
        self.assigned: dict[int, Assign] = {}
        self.stopped: list[int] = []
        self.stores: list[int] = []
        self.releases = 0
        self.refusal: JobFailedError | None = None
        self.may_place = asyncio.Event()
        self.may_place.set()
        self.deaf: set[int] = set()
        self._said: dict[int, asyncio.Queue[list[Message] | WorkerLostError]] = {
            i: asyncio.Queue() for i in range(size)
        }

    def say(self, worker: int, *messages: Message) -> None:
        self._said[worker].put_nowait(list(messages))

    def say_all(self, message: Callable[[int], Message]) -> None:
        """Every rank says the message made for it; ranks are indices here."""
        for info in self.infos:
            self.say(info.index, message(info.index))

    def kill(self, worker: int, cause: str) -> None:
        self._said[worker].put_nowait(WorkerLostError(cause))

    async def place(self, need: Need) -> tuple[WorkerInfo, ...]:
        await self.may_place.wait()
        if self.refusal is not None:
            raise self.refusal
        return self.infos

    async def open_store(self, worker: int) -> int:
        await self._hear(worker)
        self.stores.append(worker)
        return 4000 + worker

    async def assign(self, worker: int, assign: Assign) -> None:
        await self._hear(worker)
        self.assigned[worker] = assign

    async def poll(self, worker: int, timeout_s: float) -> list[Message]:
        said = await self._said[worker].get()
        if isinstance(said, WorkerLostError):
            raise said
        return said

    async def stop(self, worker: int) -> None:
        await self._hear(worker)
        self.stopped.append(worker)

    async def release(self) -> None:
        self.releases += 1

    async def _hear(self, worker: int) -> None:
        if worker in self.deaf:
            await asyncio.Event().wait()


class Notebook:
    """Keeps what an observer was shown."""

    def __init__(self) -> None:
        self.notices: list[Notice] = []

    def see(self, notice: Notice) -> None:
        self.notices.append(notice)

    def of(self, kind: type[N]) -> list[N]:
        return [notice for notice in self.notices if isinstance(notice, kind)]


def plan(folder: Path, **changes: Any) -> JobPlan:
    document = {
        "name": "job",
        "entrypoint": "m:f",
        "workers": {"min": 2},
        "checkpoint": {"path": str(folder)},
        "recovery": {"hang_timeout_s": 60.0},
        **changes,
    }
    return make_plan(validated(JobSpec, document, "job"), "m:f")
