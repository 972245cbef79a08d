"""Clock, Tasks, change notifier, pending replies.

Time as the controller sees it, so that a test can turn it by hand.

A bell for those who wait for news, in one event loop.

Background tasks with an owner, and waits with a limit.

One command that went to many workers, and who has answered it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar


class Clock(Protocol):
    def now(self) -> float:
        """Seconds; only differences mean anything."""

    async def sleep(self, seconds: float) -> None:
        """Returns after that long. Can be cancelled."""

    def timeout(self, seconds: float) -> AbstractAsyncContextManager[Any]:
        """A block that raises TimeoutError when it takes longer; what it awaits is cancelled."""


class SystemClock:
    """The real one."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def timeout(self, seconds: float) -> AbstractAsyncContextManager[Any]:
        return asyncio.timeout(seconds)


class ChangeNotifier:
    """Rung whenever something changed that somebody may be waiting for."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        waiting, self._waiters = self._waiters, set()
        for one in waiting:
            if not one.done():
                one.set_result(None)

    async def wait_until(self, so: Callable[[], bool]) -> None:
        """Returns once `so()` holds; asks at once, and again at every ring."""
        while not so():
            rung = asyncio.get_running_loop().create_future()
            self._waiters.add(rung)
            try:
                await rung
            finally:
                self._waiters.discard(rung)


T = TypeVar("T")

LARGE_JOB_WORKERS = 500
"""Workers from which on long work lets others have a turn."""


class BackgroundTasks:
    """Owns the controller's background tasks: none outlives `end`, and none fails in silence."""

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._report_errors(work))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: work.close())  # one that was cancelled before it began
        return task

    async def cancel_all(self) -> None:
        """Cancels everything but the caller, and waits until it is over."""
        mine = asyncio.current_task()
        tasks = [task for task in self._running if task is not mine]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _report_errors(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001  # whatever it is, somebody must judge it
            self._on_error(error)


async def with_timeout(clock: Clock, limit_s: float, work: Awaitable[T]) -> T:
    """What `work` brings.

    Raises:
        TimeoutError: it took longer; it is cancelled.
    """
    async with clock.timeout(limit_s):  # no task of its own: there are thousands of these a second
        return await work


async def yield_if_large(workers: int) -> None:
    """In the middle of something long, as it is with so many workers: a death must not wait for
    all of it. In small jobs nothing else gets a turn here."""
    if workers >= LARGE_JOB_WORKERS:
        await asyncio.sleep(0)


class PendingReplies:
    """Filled by the group that sent the command, in its event loop.

    Whoever is lost on the way is no longer waited for: `WorkerGroup.hear` tells of it.
    """

    def __init__(self, workers: Iterable[int] = ()) -> None:
        self.pending = set(workers)
        """Who has not answered yet."""
        self._error: Exception | None = None
        self._changed = ChangeNotifier()

    def mark_done(self, workers: Iterable[int]) -> None:
        """These have answered, or are lost."""
        self.pending.difference_update(workers)
        self._changed.notify()

    def mark_failed(self, error: Exception) -> None:
        """One of them could not do it; the first such error is raised by those who wait."""
        self._error = self._error or error
        self._changed.notify()

    async def wait_any(self, workers: frozenset[int]) -> None:
        """Returns once somebody of these is missing no longer."""
        await self._changed.wait_until(
            lambda: self._error is not None or not workers <= self.pending
        )
        self._raise_error()

    async def wait_all(self) -> None:
        """Returns once nobody is missing.

        Raises:
            RayzeroError: one of them could not do it.
        """
        await self._changed.wait_until(lambda: self._error is not None or not self.pending)
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
