"""The event loop of a job's controller, as its components use it: time, waits, tasks, events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rayzero.orchestrator import machine
from rayzero.orchestrator.aio import BackgroundTasks, ChangeNotifier, Clock, ObservedState
from rayzero.orchestrator.control.members import Members
from rayzero.orchestrator.machine import State

T = TypeVar("T")


class JobLoop:
    """Time, waits and background tasks in the controller's event loop.

    Args:
        on_error: called with each error of a background task.
    """

    def __init__(self, clock: Clock, on_error: Callable[[Exception], None]) -> None:
        self.clock = clock
        self.on_error = on_error
        self.changed = ChangeNotifier()
        """Notified by each `ObservedState` of the job."""
        self.tasks = BackgroundTasks(on_error)
        self.spawn = self.tasks.spawn
        self.now_s = clock.now
        self.sleep = clock.sleep
        self.wait_until = self.changed.wait_until

    async def within(self, limit_s: float, work: Awaitable[T]) -> T:
        """Returns the result of `work`. Raises TimeoutError if it took longer and was cancelled."""
        async with self.clock.timeout(limit_s):  # no task: thousands of calls a second
            return await work

    async def wait_for(self, limit_s: float, predicate: Callable[[], bool]) -> bool:
        """Waits until the predicate holds. Returns False if it does not within the limit."""
        try:
            await self.within(limit_s, self.wait_until(predicate))
        except TimeoutError:
            return False
        return True


class JobMachine(ObservedState):
    """The state of the job, which only the controller changes, and the queue of the events that
    change it (`rayzero.orchestrator.machine`)."""

    def __init__(self, members: Members, on_change: Callable[[], None]) -> None:
        super().__init__(on_change)
        self._members = members
        self.state = State.PENDING
        self._events: asyncio.Queue[machine.Event] = asyncio.Queue()
        self.post = self._events.put_nowait
        self.next_event = self._events.get

    @property
    def is_running(self) -> bool:
        """Whether the job is training and no fault, resize or stop is pending."""
        return self.state is State.RUNNING and not self._members.generation.fenced
