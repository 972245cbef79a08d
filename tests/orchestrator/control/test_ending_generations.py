"""Members that do not leave a generation that ends, or that leave it too early."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.job_events import FaultDetected, JobWarning
from rayzero.orchestrator.machine import State
from rayzero.workers.messages import Finished
from tests.orchestrator.support import Harness, settle


@pytest.mark.parametrize("stays", [False, True])
async def test_survivors_in_a_long_call_are_waited_for(folder: Path, stays: bool):
    """Those that stay are killed and replaced."""
    harness = await Harness(folder, 3, workers=(1, 3)).trained(3)
    cluster = harness.cluster
    for worker in (1, 2):
        cluster.processes[worker].stuck = True
        cluster.send_heartbeat(worker)
    await harness.kill(0, wait_s=25)
    assert harness.states[-1] is State.RECOVERING
    reports = [w.text for w in harness.log.of(JobWarning) if "to leave" in w.text]
    assert len(reports) == 3  # after 5, 10 and 20 s
    assert "since 6 s for rank 1 on node host-a (pid 101) to leave" in reports[0]
    assert "recovery.hang_timeout_s" in reports[0]
    if stays:
        await harness.clock.advance(34)
        assert harness.states[-1] is State.RECOVERING
        await harness.clock.advance(3)
        assert sorted(worker for worker, _, _ in cluster.replaced) == [0, 1, 2]
        for _ in range(3):
            cluster.join()
        await harness.clock.advance(1)
    else:
        for worker in (1, 2):
            cluster.release_stuck(worker)
        await settle()
        assert sorted(harness.assignments) == [1, 2]
    killed = sorted(worker for name, worker in cluster.commands if name == "kill")
    assert killed == ([0, 1, 2] if stays else [0])
    metrics = (await harness.finish()).metrics
    assert metrics["steps_redone"] == 0
    assert metrics["faults"] == ({"hang": 2, "lost": 1} if stays else {"lost": 1})


async def test_survivor_that_stays_does_not_take_the_others_with_it(folder: Path):
    harness = await Harness(folder, 4, workers=(2, 4)).trained(3)
    harness.cluster.processes[1].stuck = True
    harness.cluster.send_heartbeat(1)
    harness.cluster.delays["kill"] = 80  # the next generation waits until both are dead
    await harness.kill(0, wait_s=62)
    assert ("kill", 1) in harness.cluster.commands
    assert sorted(harness.assignments) == [2, 3]
    assert (await harness.finish()).metrics["faults"] == {"hang": 1, "lost": 1}


async def test_replacement_may_take_four_measured_first_steps(folder: Path):
    """Not `workers.start_timeout_s`: the job has shown how long its processes compile."""
    harness = Harness(folder, 2, workers=(2, 2))
    cluster = harness.cluster
    await harness.clock.advance(20)
    await harness.steps(1)
    await harness.kill(0, wait_s=1)
    await harness.join(wait_s=1)
    assert sorted(harness.assignments) == [1, 2]
    cluster.processes[2].stuck = True
    cluster.send_heartbeat(2)
    await harness.kill(1, wait_s=61)
    waiting = [w.text for w in harness.log.of(JobWarning) if "to leave" in w.text]
    assert "it is killed after 80 s, 4 times the longest first step of a process" in waiting[0]
    assert ("kill", 2) not in cluster.commands
    await harness.clock.advance(22)
    assert ("kill", 2) in cluster.commands
    await harness.stop()


async def test_rank_that_stays_after_a_drain_is_killed(folder: Path):
    """It caught the exception that ends its generation, and waits for ranks that have left."""
    harness = await Harness(folder, 2, workers=(1, 3)).trained(1)
    cluster = harness.cluster
    await harness.join(wait_s=1)
    assert harness.states[-1] is State.RESIZING
    left, stays = cluster.processes[0], cluster.processes[1]
    cluster.send_heartbeat(1, waiting=True)
    cluster._unwind(left)
    stays.stuck = True
    await harness.clock.advance(62)
    assert ("kill", 1) in cluster.commands
    assert sorted(harness.assignments) == [0]


async def test_rank_that_returns_early_is_named(folder: Path):
    harness = await Harness(folder, 2, workers=(2, 2)).trained(2)
    cluster = harness.cluster
    for attempt, worker in enumerate((0, 2)):
        generation = harness.assignments[worker].generation
        cluster.send_heartbeat(worker, step=2, collective=7)
        cluster.processes[worker].assign = None
        cluster.send(worker, Finished(generation, 0, {}, {}, 1))
        cluster.send_heartbeat(1, collective=8, waiting=True, silent_s=4)
        await harness.clock.advance(1.5)
        if attempt == 0:
            assert [fault.cause for fault in harness.log.of(FaultDetected)] == ["early_return"]
            assert sorted(harness.assignments) == [1, 2]
    await harness.fails(JobFailedError, r"rank 0 .*it returned from the training function")
    assert len(harness.log.of(FaultDetected)) == 2
