"""Generation numbers: durable before they are given, and never given twice."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from rayzero.engine.data.sample_ledger import SampleLedger
from rayzero.orchestrator.control.generation import GenerationNumbers
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.facts import RESERVED_GENERATIONS, EventBus, JobFacts
from rayzero.orchestrator.machine import State
from tests.orchestrator.support import Harness, VirtualClock, begun, plan, reread, settle

LIMIT_S = 70.0


async def test_adopting_controller_gives_no_number_again(folder: Path):
    """Four controllers in a row are killed after they formed generations. The journal has none of
    them: its disk is written only when it is flushed. The ledger takes each number once."""
    job = plan(folder, workers=(1, 2))
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
            await harness.kill(max(harness.assignments), wait_s=1)
            await harness.join(wait_s=1)
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


async def test_repairs_do_not_wait_for_failing_store(folder: Path):
    del folder
    events, clock, fails = EventBus(), VirtualClock(), True

    async def flush(limit_s: float) -> bool:
        await clock.sleep(limit_s if fails else 0.0)
        return not fails

    events.emit(begun({}))
    numbers = GenerationNumbers(events, flush, clock, LIMIT_S)
    waiting = asyncio.ensure_future(numbers.await_reserved())
    await clock.advance(LIMIT_S / 2)
    assert not waiting.done()
    await clock.advance(LIMIT_S)
    with pytest.raises(JobFailedError, match="journal cannot be written for 70 s"):
        await waiting
    fails = False
    waiting = asyncio.ensure_future(numbers.await_reserved())
    await clock.advance(0)
    await waiting
    fails = True
    for number in range(1, 3 * RESERVED_GENERATIONS):
        await numbers.await_reserved()
        assert numbers.next() == number
        assert events.facts.reserved_generations >= number + RESERVED_GENERATIONS // 2


async def test_first_generation_waits_until_its_number_is_durable(folder: Path):
    written = asyncio.Event()

    async def flush(limit_s: float) -> bool:
        del limit_s
        await written.wait()
        return True

    harness = await Harness(folder, flush_journal=flush).started()
    assert (harness.states, harness.cluster.assigned) == ([State.STARTING], [])
    written.set()
    await harness.steps(1)
