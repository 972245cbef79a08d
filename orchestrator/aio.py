"""The controller's asyncio helpers: clock, change notifier, background tasks, replies.

All of it belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rayzero.workers.step_rows import ReceivedMessage


class Clock:
    """Monotonic time of the operating system; tests pass a virtual clock."""

    now = staticmethod(time.monotonic)
    sleep = staticmethod(asyncio.sleep)
    timeout = staticmethod(asyncio.timeout)


class ChangeNotifier:
    """Wakes coroutines that wait for a predicate on shared state.

    Like asyncio.Condition without a lock: `notify` is synchronous, which one event loop permits.
    """

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Wakes the waiters in the next turn of the event loop: once, however many changes this
        turn makes."""
        if not self._waiters:
            return
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_until(self, predicate: Callable[[], bool]) -> None:
        """Waits until the predicate holds; evaluates it at once, and after every `notify`."""
        while not predicate():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)


class ObservedState:
    """Base class of state that waiters' predicates read (`ChangeNotifier.wait_until`).

    Assigning an attribute calls `on_change`, so that no code has to remember to wake the waiters. A
    container in an attribute is either immutable, and replaced as a whole; or it is mutated only by
    methods of the class, which then call `_changed`.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        super().__setattr__("_changed", on_change)

    _changed: Callable[[], None]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self._changed()


WORKER_POLL_S = 2.0
"""Longest time between two messages of a subscribed worker. A worker that has nothing to report
sends an empty message, which shows that it is alive."""


class BackgroundTasks:
    """Owns the controller's background tasks. Their errors go to `on_error`; `cancel_all` ends
    them."""

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._report_errors(work))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: work.close())  # cancelled before its first step
        return task

    async def cancel_all(self) -> None:
        """Cancels all tasks but the caller's, and waits until they have ended."""
        caller = asyncio.current_task()
        tasks = [task for task in self._running if task is not caller]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _report_errors(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001  # the owner handles each
            self._on_error(error)


def resolve(reply: asyncio.Future[Any], error: Exception | None, result: Any = None) -> None:
    """Sets what a call has returned or raised, unless the caller has given up."""
    if reply.done():
        return
    if error is not None:
        reply.set_exception(error)
    else:
        reply.set_result(result)


class PendingReplies:
    """The replies to one command that was sent to many workers.

    The sender calls `mark_done` and `mark_failed`. A lost worker counts as done, because
    `WorkerGroup.receive` reports its loss.
    """

    def __init__(self, workers: Iterable[int] = ()) -> None:
        self.pending = set(workers)
        """Workers that have not replied yet."""
        self._error: Exception | None = None
        self._changed = ChangeNotifier()

    def mark_done(self, workers: Iterable[int]) -> None:
        """Records that these workers have replied or are lost."""
        self.pending.difference_update(workers)
        self._changed.notify()

    def mark_failed(self, error: Exception) -> None:
        """Records that a worker failed to execute the command. Waiters raise the first such
        error."""
        self._error = self._error or error
        self._changed.notify()

    async def wait_all(self) -> None:
        """Waits until all workers are done. Raises RayzeroError if one failed to execute the
        command."""
        await self._changed.wait_until(lambda: self._error is not None or not self.pending)
        if self._error is not None:
            raise self._error


@dataclass(frozen=True)
class WorkerReports:
    """Messages and losses of several workers.

    Args:
        messages: (worker, its messages in order); an empty list says that the worker is alive. The
            receiver owns the lists.
        lost: (worker, the cause if it is known). A lost worker's last messages are in `messages`,
            or were received before.
    """

    messages: Sequence[tuple[int, list[ReceivedMessage]]] = ()
    lost: Sequence[tuple[int, str]] = ()
