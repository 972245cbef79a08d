"""Background tasks with an owner, and waits with a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from rayzero.orchestrator.clock import Clock

T = TypeVar("T")

MANY = 500
"""Workers from which on long work lets others have a turn."""


class Tasks:
    """Owns the controller's background tasks: none outlives `end`, and none fails in silence."""

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._guarded(work))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: work.close())  # one that was cancelled before it began
        return task

    async def end(self) -> None:
        """Cancels everything but the caller, and waits until it is over."""
        mine = asyncio.current_task()
        tasks = [task for task in self._running if task is not mine]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _guarded(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001  # whatever it is, somebody must judge it
            self._on_error(error)


async def within(clock: Clock, limit_s: float, work: Awaitable[T]) -> T:
    """What `work` brings.

    Raises:
        TimeoutError: it took longer; it is cancelled.
    """
    async with clock.timeout(limit_s):  # no task of its own: there are thousands of these a second
        return await work


async def breath(workers: int) -> None:
    """In the middle of something long, as it is with so many workers: a death must not wait for
    all of it. In small jobs nothing else gets a turn here."""
    if workers >= MANY:
        await asyncio.sleep(0)
