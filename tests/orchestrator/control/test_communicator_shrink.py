"""When survivors shrink their communicator, and when the next generation uses it."""

from __future__ import annotations

from pathlib import Path

from rayzero.orchestrator.control.failures import COLLECTIVE_GRACE_S
from rayzero.orchestrator.machine import State
from tests.orchestrator.control.test_reconfigure import warnings
from tests.orchestrator.fake_cluster import FakeCluster
from tests.orchestrator.support import Harness, async_test, settle

ON = {"communicator_shrink": True}


def start(folder: Path, size: int = 3, **workers: object) -> Harness:
    limits = {"min": 2, "max": size} | workers
    return Harness(folder, FakeCluster(size), workers=limits, recovery=ON)


def commands(harness: Harness) -> set[str]:
    return {name for name, _ in harness.cluster.commands}


def shrunk(harness: Harness, generation: int) -> dict[int, bool]:
    """What the members of a generation were told."""
    assigned = harness.cluster.assigned
    return {worker: one.shrunk for worker, one in assigned if one.generation == generation}


@async_test
async def test_ranks_just_go(folder: Path):
    harness = start(folder, 4)
    await harness.steps(2)
    harness.cluster.kill(1)
    await settle()
    assert harness.cluster.shrunk_by == dict.fromkeys((0, 2, 3), (1, (1,)))
    assert "fence" not in commands(harness)
    assert shrunk(harness, 2) == {0: True, 2: True, 3: True}
    await harness.steps(1)
    harness.cluster.kill(3)
    await settle()
    assert harness.cluster.shrunk_by[0] == (2, (2,)), "its rank in generation 2"
    assert shrunk(harness, 3) == {0: True, 2: True}
    await harness.steps(1)
    result = await harness.finish()
    assert result.metrics["steps_redone"] == 0
    assert "communicator" not in warnings(harness)


@async_test
async def test_spare_takes_part_by_a_rendezvous(folder: Path):
    harness = start(folder, min=2, max=2, spares=1)
    await harness.steps(2)
    harness.cluster.kill(0)
    await settle()
    assert sorted(harness.assignments) == [1, 2]
    assert commands(harness) & {"shrink", "fence"} == {"fence"}
    await harness.finish()


@async_test
async def test_replacement_that_is_ready_meanwhile_takes_part_by_a_rendezvous(folder: Path):
    harness = start(folder)
    await harness.steps(2)
    harness.cluster.shrink_stands = {2}
    harness.cluster.kill(1)
    await settle()
    new = harness.cluster.join()
    await settle()
    harness.cluster.end_shrink(2)
    await settle()
    assert shrunk(harness, 2) == {0: False, 2: False, new: False}
    await harness.steps(1)
    await harness.finish()


@async_test
async def test_one_that_fails_ends_the_attempt_of_all(folder: Path):
    harness = start(folder, 4)
    await harness.steps(2)
    harness.cluster.shrink_errors[2] = "NCCL error: injected"
    harness.cluster.shrink_stands = {3}
    harness.cluster.kill(1)
    await settle()
    assert ("fence", 3) in harness.cluster.commands, "it waits for rank 2 otherwise"
    assert shrunk(harness, 2) == {0: False, 2: False, 3: False}
    assert "rank 2 could not shrink its communicator: NCCL error: injected" in warnings(harness)
    assert "(recovery.communicator_shrink)" in warnings(harness)
    await harness.steps(1)
    harness.cluster.commands.clear()
    harness.cluster.kill(3)
    await settle()
    assert commands(harness) & {"shrink", "fence"} == {"fence"}, "it does not try again"
    assert shrunk(harness, 3) == {0: False, 2: False}
    await harness.finish()


@async_test
async def test_second_loss_ends_the_attempt(folder: Path):
    harness = start(folder, 4)
    await harness.steps(2)
    harness.cluster.shrink_stands = {2, 3}
    harness.cluster.kill(1)
    await settle()
    assert harness.cluster.shrunk_by == {0: (1, (1,))}
    harness.cluster.kill(3)
    await settle()
    assert ("fence", 2) in harness.cluster.commands
    assert shrunk(harness, 2) == {0: False, 2: False}
    assert "communicator" not in warnings(harness)
    await harness.steps(1)
    await harness.finish()


@async_test
async def test_failed_collective_without_a_loss_aborts_the_communicator(folder: Path):
    """Nobody goes: all take part again."""
    harness = start(folder)
    await harness.steps(2)
    harness.cluster.crash(1, "collective", "Connection closed")
    await harness.clock.advance(COLLECTIVE_GRACE_S)
    assert harness.states[-1] is State.RUNNING
    assert commands(harness) & {"shrink", "fence"} == {"fence"}
    assert shrunk(harness, 2) == {0: False, 1: False, 2: False}
    await harness.finish()


@async_test
async def test_it_is_off_by_default(folder: Path):
    harness = Harness(folder, FakeCluster(3), workers={"min": 2, "max": 3})
    await harness.steps(2)
    harness.cluster.kill(1)
    await settle()
    assert commands(harness) & {"shrink", "fence"} == {"fence"}
    assert not any(one.shrinks or one.shrunk for _, one in harness.cluster.assigned)
    await harness.finish()
