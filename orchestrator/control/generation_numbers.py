"""Numbers of generations: each is durable in the journal before it is given."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rayzero.orchestrator.aio import BackgroundTasks, Clock
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.job_events import JobEvent, NumbersReserved

BLOCK_SIZE = 100
"""Numbers that one journal entry reserves. The next block is reserved when half of one is left, so
that a repair waits for the journal only after so many others during one outage of its store."""
FLUSH_SLICE_S = 1.0
"""Longest single wait for the journal's thread, which nothing can interrupt."""


class GenerationNumbers:
    """Counts the generations of a run. A controller that adopts the run begins after the last
    number that the journal has as reserved: its predecessor may have formed generations after its
    last entry, but gave them no number beyond that one.

    Args:
        emit: takes the event by which the journal reserves numbers.
        flush_journal: waits up to so many seconds until all events so far are durable; returns
            whether they are.
        limit_s: how long a generation that has no number yet waits for the journal.
    """

    def __init__(
        self,
        emit: Callable[[JobEvent], None],
        flush_journal: Callable[[float], Awaitable[bool]],
        clock: Clock,
        tasks: BackgroundTasks,
        limit_s: float,
    ) -> None:
        self._emit = emit
        self._flush_journal = flush_journal
        self._clock = clock
        self._tasks = tasks
        self._limit_s = limit_s
        self._given = 0
        self._reserved = 0
        self._reserving: asyncio.Task[None] | None = None

    def continue_after(self, number: int) -> None:
        """An earlier controller may have given all numbers up to this one."""
        self._given = self._reserved = number

    def reserve(self) -> None:
        """Begins to reserve the next block, unless that is in progress."""
        if self._reserving is None or self._reserving.done():
            self._reserving = self._tasks.spawn(self._reserve(self._reserved + BLOCK_SIZE))

    async def await_reserved(self) -> None:
        """Waits for the journal, if the next number is not reserved yet.

        Raises:
            JobFailedError: the journal could not be written for `limit_s`.
        """
        if self._given == self._reserved:
            self.reserve()
            if self._reserving is not None:
                await asyncio.wait([self._reserving])
        if self._given == self._reserved:
            raise JobFailedError(
                f"the job's journal cannot be written for {self._limit_s:g} s, and a generation of "
                "workers begins only once its number is there",
                allowed=f"a shorter outage, or at most {BLOCK_SIZE // 2} repairs during one",
                fix="checkpoint.path, the disk or store it is on, or a longer "
                "recovery.hang_timeout_s, of which half is waited for",
            )

    def next(self) -> int:
        """The number of a new generation; `await_reserved` has returned since the last one."""
        self._given += 1
        if self._reserved - self._given < BLOCK_SIZE // 2:
            self.reserve()
        return self._given

    async def _reserve(self, last: int) -> None:
        until_s = self._clock.now() + self._limit_s
        self._emit(NumbersReserved(last))
        while not await self._flush_journal(FLUSH_SLICE_S):
            if self._clock.now() > until_s:
                return  # the journal's thread has warned, and keeps trying
        self._reserved = last
