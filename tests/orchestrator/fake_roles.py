"""The processes of a role, as the controller sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from rayzero.orchestrator.aio import WorkerReports
from rayzero.orchestrator.errors import WorkerStartError
from rayzero.workers.messages import Crashed, Finished, WorkerInfo, WorkerMessage
from rayzero.workers.roles.view import RoleView
from rayzero.workers.stacks import Stacks
from rayzero.workers.worker_status import WorkerStatus


class FakeRoleGroup:
    """The processes of one role. `start` is a process that starts; the test calls it."""

    def __init__(self, index: int = 100) -> None:
        self.began: dict[int, tuple[int, str]] = {}
        """By worker, its number and its vault."""
        self.views: dict[int, list[RoleView]] = {}
        """By worker, what it was told of the job."""
        self.updating = asyncio.Event()
        """Workers reply to updates."""
        self.updating.set()
        self.replaced: list[tuple[int, float]] = []
        self.killed: list[int] = []
        self.released: list[int] = []
        self.ended: list[int] = []
        self.injected: list[tuple[int, str]] = []
        self.left: frozenset[str] = frozenset()
        self.wanted = (0, 0)
        self.alive: dict[int, WorkerInfo] = {}
        """Processes that have started."""
        self.ends: dict[int, WorkerMessage] = {}
        """The ends of functions, which their processes remember."""
        self._index = index
        self._started: asyncio.Queue[WorkerInfo | Exception] = asyncio.Queue()
        self._reports: asyncio.Queue[WorkerReports] = asyncio.Queue()

    def start(self, node: str = "a") -> int:
        self._index += 1
        self.alive[self._index] = self.info(self._index, node)
        self._started.put_nowait(self.alive[self._index])
        return self._index

    def info(self, index: int, node: str = "a") -> WorkerInfo:
        return WorkerInfo(index, node, f"node-{node}", "10.0.0.1", 5000 + index)

    def fail_start(self, *, repeats: bool = False) -> None:
        info = self.info(0)
        self._started.put_nowait(WorkerStartError("no memory", info, repeats, 1.0))

    def statuses(self, role: str) -> list[WorkerStatus]:
        """What its living processes answer to another controller."""
        return [
            WorkerStatus(
                info,
                "",
                messages=(self.ends[index],) if index in self.ends else (),
                role=role,
                number=self.began.get(index, (None,))[0],
            )
            for index, info in self.alive.items()
        ]

    def post(self, index: int, *messages: WorkerMessage) -> None:
        for end in (it for it in messages if isinstance(it, Finished | Crashed)):
            self.ends[index] = end
        self._reports.put_nowait(WorkerReports([(index, list(messages))]))

    def lose(self, index: int, cause: str = "killed") -> None:
        self.alive.pop(index, None)
        self._reports.put_nowait(WorkerReports(lost=[(index, cause)]))

    async def start_workers(self, need: Any, on_failure: Any, on_waiting: Any) -> Any:
        self.wanted = need.min_workers, need.max_workers
        started = []
        while len(started) < need.min_workers:
            event = await self._started.get()
            if isinstance(event, WorkerStartError):
                on_failure(event)
            else:
                started.append(event)
        return tuple(started)

    def resume(self, need: Any) -> None:
        self.wanted = need.min_workers, need.max_workers

    async def next_worker(self) -> WorkerInfo:
        event = await self._started.get()
        if isinstance(event, Exception):
            raise event
        return cast(WorkerInfo, event)

    async def call(self, worker: int, method: Callable[..., Any], *args: Any) -> Any:
        if method.__name__ == "begin":
            number, view = args
            self.began[worker] = number, view.vault
            self.views[worker] = [view]
        elif method.__name__ == "update":
            self.views[worker].append(args[0])
            await self.updating.wait()
        elif method.__name__ == "dump_stack":
            return Stacks("Thread training: in sleep", "m.py:3")
        elif method.__name__ == "end":
            self.ended.append(worker)
            self.post(worker, Finished(0, self.began[worker][0], None, {}, 0))
        elif method.__name__ == "inject":
            self.injected.append((worker, *args))
        return None

    async def receive(self) -> WorkerReports:
        return await self._reports.get()

    async def leave_nodes(self, draining: frozenset[str]) -> None:
        self.left = draining

    async def kill(self, worker: int) -> None:
        self.alive.pop(worker, None)
        self.killed.append(worker)

    def replace(self, worker: int, delay_s: float, avoid: list[str]) -> None:
        self.replaced.append((worker, delay_s))

    def resize(self, least: int, most: int) -> None:
        self.wanted = least, most

    async def release_worker(self, worker: int) -> None:
        self.alive.pop(worker, None)
        self.released.append(worker)

    def subscribe(self, workers: Any) -> None:
        """All are."""

    async def release(self) -> None:
        """Nothing is left."""
