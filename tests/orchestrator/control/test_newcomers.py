"""Training functions of new workers, which are called before their generation begins."""

from __future__ import annotations

from pathlib import Path

from rayzero.orchestrator.control.elastic import JOIN_BATCH_S
from rayzero.orchestrator.job_events import FaultDetected
from rayzero.orchestrator.machine import State
from rayzero.workers.messages import Finished
from tests.orchestrator.support import Harness, settle


async def train_with_newcomer(folder: Path, most: int = 3, **settings: object) -> Harness:
    """Two ranks train; the function of a third is called, and has not come to its engine."""
    workers = {"min": 1, "max": most, **settings}
    harness = Harness(folder, workers=workers)
    harness.cluster.prepares = False
    await harness.steps(3)
    await harness.join()
    ahead = harness.cluster.processes[2].ahead
    assert (ahead.rank, ahead.world_size, ahead.restore) == (2, 3, None)
    await harness.steps(2)
    assert harness.states[-1] is State.RUNNING
    return harness


async def test_others_train_until_a_new_function_is_prepared(folder: Path):
    harness = await train_with_newcomer(folder)
    harness.cluster.prepare(2)
    await settle()
    assert harness.states[-1] is State.RESIZING
    await harness.steps(1)
    assert sorted(harness.assignments) == [0, 1, 2]
    assert harness.assignments[2].rank == 2
    result = await harness.finish()
    assert (result.metrics["steps_redone"], result.metrics["faults"]) == (0, {})


async def test_job_goes_on_where_a_new_function_fails(folder: Path):
    harness = await train_with_newcomer(folder)
    await harness.crash(2, "user", "ZeroDivisionError: a mean over nothing", step=0)
    assert harness.states[-1] is State.RUNNING
    (fault,) = harness.log.of(FaultDetected)
    assert (fault.cause, fault.rank, fault.is_fatal) == ("newcomer", 2, False)
    assert "a mean over nothing" in fault.text
    assert "the user's frames" in fault.text
    assert "without rank 2" in harness.warnings
    assert harness.cluster.replaced == [], "it would fail again"
    await harness.steps(2)
    await harness.kill(1)
    await harness.steps(1)
    await harness.clock.advance(1)
    assert {worker for worker, _, _ in harness.cluster.replaced} == {1, 2}, "tried again"


async def test_new_function_that_returns_or_is_late_is_left_out(folder: Path):
    harness = await train_with_newcomer(folder, start_timeout_s=50)
    await harness.send(2, Finished(2, 2, {}, {}, 1))
    assert harness.cluster.processes[2].alive is False
    await harness.send(2, Finished(2, 2, {}, {}, 1))
    assert len(harness.log.of(FaultDetected)) == 1, "a late message of a worker that was left out"
    await harness.join()
    await harness.clock.advance(50)
    texts = [fault.text for fault in harness.log.of(FaultDetected)]
    assert ["returned before it trained" in texts[0], "within 50 s" in texts[1]] == [True, True]
    assert harness.states[-1] is State.RUNNING


async def test_worker_that_comes_meanwhile_joins_later(folder: Path):
    """The first one's function was called for three ranks."""
    harness = await train_with_newcomer(folder, most=4)
    await harness.join()
    assert harness.cluster.processes[3].ahead is None
    harness.cluster.prepares = True
    harness.cluster.prepare(2)
    await settle()
    await harness.steps(1)
    assert sorted(harness.assignments) == [0, 1, 2]
    await harness.clock.advance(JOIN_BATCH_S)
    await harness.steps(1)
    assert sorted(harness.assignments) == [0, 1, 2, 3]
    result = await harness.finish()
    assert result.metrics["world_sizes"] == [2, 3, 4]


async def test_new_function_whose_rank_a_fault_has_taken_is_called_again(folder: Path):
    harness = await train_with_newcomer(folder)
    await harness.kill(1)
    assert sorted(harness.assignments) == [0]
    assert harness.cluster.processes[2].retired
    harness.cluster.prepares = True
    await harness.steps(1)
    await harness.clock.advance(JOIN_BATCH_S)
    await harness.steps(1)
    assert harness.ranks == {0: 0, 3: 1}


async def test_new_function_continues_in_the_place_of_a_lost_one(folder: Path):
    """It was called as rank 1 of 2, on its way to its engine, when rank 1 was lost."""
    harness = Harness(folder, "ab", workers=(2, 2))
    harness.cluster.prepares = False
    await harness.steps(3)
    harness.cluster.draining = frozenset({"b"})
    await harness.join("c", wait_s=3)
    assert harness.cluster.processes[2].ahead is not None
    await harness.kill(1)
    assert harness.ranks == {0: 0, 2: 1}
    assert harness.cluster.processes[2].retired is False


async def test_function_is_not_called_ahead_of_a_generation_without_survivors(folder: Path):
    harness = await Harness(folder, 1, workers=(1, 1)).trained(2)
    harness.cluster.draining = frozenset({"a"})
    await harness.join("b", wait_s=3)
    assert harness.cluster.processes[1].ahead is None
    await harness.steps(1)
    assert {it.survivors_stay for it in harness.assignments.values()} == {False}
    assert sorted(harness.assignments) == [1]


async def test_where_functions_do_not_stay_a_new_one_is_called_again(folder: Path):
    harness = await train_with_newcomer(folder)
    harness.cluster.leaving = {0, 1}
    harness.cluster.prepare(2)
    await harness.steps(1)
    assert harness.cluster.processes[2].retired
    await harness.clock.advance(1)
    assert {it.survivors_stay for it in harness.assignments.values()} == {False}
    assert len(harness.assignments) == 3
