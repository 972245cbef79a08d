"""Generation numbers: durable before they are given, and never given twice."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from rayzero.engine.data.sample_ledger import SampleLedger
from rayzero.orchestrator.aio import BackgroundTasks
from rayzero.orchestrator.control.generation_numbers import BLOCK_SIZE, GenerationNumbers
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.facts import JobFacts
from rayzero.orchestrator.job_events import JobEvent, NumbersReserved
from rayzero.orchestrator.machine import State
from tests.orchestrator.support import (
    Harness,
    VirtualClock,
    async_test,
    begun,
    plan,
    reread,
    settle,
)

LIMIT_S = 70.0


@async_test
async def test_adopting_controller_gives_no_number_again(folder: Path):
    """Four controllers in a row are killed after they formed generations. The journal has none of
    them: its disk is written only when it is flushed. The ledger takes each number once."""
    job = plan(folder, workers={"min": 1, "max": 2})
    durable = JobFacts().apply(begun(job), time.time())  # lost before its first generation
    given: list[int] = []
    for repairs in (0, 1, 3, 0):
        running: list[Harness] = []

        async def flush(limit_s: float, running: list[Harness] = running) -> bool:
            nonlocal durable
            durable = reread(running[0].events.facts)
            return limit_s > 0

        workers = {"min": 1, "max": 2}
        harness = Harness(folder, past=durable, flush_journal=flush, workers=workers)
        running.append(harness)
        await harness.steps(2)
        for _ in range(repairs):
            harness.cluster.kill(max(harness.assignments))
            await harness.clock.advance(1)
            harness.cluster.join()
            await harness.clock.advance(1)
            await harness.steps(1)
        harness.run.cancel()  # no entry is written any more
        await settle()
        numbers = sorted({assign.generation for _, assign in harness.cluster.assigned})
        assert durable.generation < numbers[0], "the journal has the generation: nothing was lost"
        given += numbers
        for number in numbers:
            SampleLedger(folder / "ledger", number, 0, 1)
    assert len(given) > 6
    assert given == sorted(set(given))


class Journal:
    """A journal whose store can fail."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.reserved: list[int] = []
        self.fails = False
        self.tasks = BackgroundTasks(lambda error: pytest.fail(str(error)))
        self.numbers = GenerationNumbers(self.emit, self.flush, self.clock, self.tasks, LIMIT_S)

    def emit(self, event: JobEvent) -> None:
        assert isinstance(event, NumbersReserved)
        self.reserved.append(event.last)

    async def flush(self, limit_s: float) -> bool:
        await self.clock.sleep(limit_s if self.fails else 0.0)
        return not self.fails

    async def give(self) -> int:
        giving = asyncio.ensure_future(self.numbers.await_reserved())
        await self.clock.advance(0)
        assert giving.done(), "a repair waits for the journal"
        await giving
        return self.numbers.next()


@async_test
async def test_repairs_do_not_wait_for_failing_store(folder: Path):
    del folder
    journal = Journal()
    assert [await journal.give() for _ in range(BLOCK_SIZE // 2)] == [
        *range(1, BLOCK_SIZE // 2 + 1)
    ]
    journal.fails = True
    assert [await journal.give() for _ in range(BLOCK_SIZE // 2)][-1] == BLOCK_SIZE
    assert set(journal.reserved) == {BLOCK_SIZE, 2 * BLOCK_SIZE}
    giving = asyncio.ensure_future(journal.numbers.await_reserved())
    await journal.clock.advance(LIMIT_S / 2)
    assert not giving.done()
    await journal.clock.advance(2 * LIMIT_S)
    with pytest.raises(JobFailedError, match="journal cannot be written for 70 s"):
        await giving
    journal.fails = False
    assert await journal.give() == BLOCK_SIZE + 1
    await journal.tasks.cancel_all()


@async_test
async def test_first_generation_waits_until_its_number_is_durable(folder: Path):
    written = asyncio.Event()

    async def flush(limit_s: float) -> bool:
        del limit_s
        await written.wait()
        return True

    harness = Harness(folder, flush_journal=flush)
    await settle()
    assert (harness.states, harness.cluster.assigned) == ([State.STARTING], [])
    written.set()
    await harness.steps(1)
    await harness.finish()
