"""Checkpoints and remote copies behind training, and a stop that keeps what was trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayzero.engine.errors import DataError, RayzeroError
from rayzero.orchestrator import machine
from rayzero.orchestrator.control.checkpoints import WRITE_RETRY_BACKOFF_S
from rayzero.orchestrator.errors import JobStoppedError
from rayzero.orchestrator.job_events import Checkpointed, CheckpointFailed
from rayzero.orchestrator.machine import State
from rayzero.workers.messages import Pinned
from tests.orchestrator.support import Stage, played, settle
from tests.orchestrator.world import World

FULL = RayzeroError("the disk is full")


def often(folder: Path, every: int = 2, **changes: object) -> Stage:
    checkpoint = {"every_steps": every} | dict(changes.pop("checkpoint", {}))  # type: ignore[call-overload]
    world = World(3, checkpoint_every=every)
    return Stage(folder, world, workers={"min": 2, "max": 3}, checkpoint=checkpoint, **changes)


def pinned(stage: Stage) -> set[int]:
    return {
        slot.step
        for vault in stage.world.vaults.of.values()
        for slot in vault.slots.values()
        if slot.pinned
    }


@played
async def test_a_pinned_step_becomes_a_checkpoint_and_is_freed(folder: Path):
    stage = often(folder)
    await stage.steps(5)
    assert stage.shelf.steps == [2, 4]
    assert stage.shelf.prunes == 2
    assert pinned(stage) == set()
    told = stage.notebook.of(Checkpointed)
    assert [(one.step, one.nbytes, one.stopped_s) for one in told] == [
        (2, 192, 0.01),
        (4, 192, 0.01),
    ]
    result = await stage.finish()
    assert result.metrics["checkpoints"] == {"written": 3, "failed": 0}


@played
async def test_training_goes_on_while_a_checkpoint_is_written(folder: Path):
    stage = often(folder)
    stage.world.vaults.may_write.clear()
    await stage.steps(7)
    assert pinned(stage) == {2}
    assert stage.shelf.steps == []
    stage.world.vaults.may_write.set()
    await settle()
    assert stage.shelf.steps == [2]
    await stage.finish()


@played
async def test_the_job_ends_when_its_last_checkpoint_is_stored(folder: Path):
    stage = often(folder)
    await stage.steps(1)
    stage.world.vaults.may_write.clear()
    await settle()
    assert stage.world.step(last=True)
    await stage.clock.turn(30)
    assert not stage.run.done()
    stage.world.vaults.may_write.set()
    await settle()
    assert (await stage.result()).metrics["checkpoints"]["written"] == 1


@played
async def test_a_failed_write_is_told_tried_again_and_counted(folder: Path):
    stage = often(folder)
    stage.world.vaults.write_errors = [FULL, FULL]
    await stage.steps(3)
    (told,) = stage.notebook.of(CheckpointFailed)
    assert (told.step, told.text, told.tries, told.again_in_s) == (2, "the disk is full", 1, 1.0)
    await stage.clock.turn(WRITE_RETRY_BACKOFF_S[0])
    await stage.clock.turn(WRITE_RETRY_BACKOFF_S[1])
    assert stage.shelf.steps == [2]
    assert (await stage.finish()).metrics["checkpoints"] == {"written": 2, "failed": 2}


@played
async def test_a_checkpoint_is_given_up_after_some_tries_and_the_next_one_gets_its_chance(
    folder: Path,
):
    stage = often(folder)
    stage.shelf.errors = [FULL] * (len(WRITE_RETRY_BACKOFF_S) + 1)
    await stage.steps(3)
    await stage.clock.turn(sum(WRITE_RETRY_BACKOFF_S))
    told = stage.notebook.of(CheckpointFailed)
    assert [one.again_in_s for one in told] == [*WRITE_RETRY_BACKOFF_S, None]
    assert pinned(stage) == set()
    await stage.steps(1)
    assert stage.shelf.steps == [4]
    await stage.finish()


@played
async def test_what_is_gone_from_a_vault_is_not_asked_for_again(folder: Path):
    stage = often(folder)
    stage.world.vaults.write_errors = [DataError("the slot is gone")]
    await stage.steps(3)
    (told,) = stage.notebook.of(CheckpointFailed)
    assert (told.step, told.tries, told.again_in_s) == (2, 1, None)
    await stage.finish()


@played
async def test_a_checkpoint_under_way_survives_a_repair(folder: Path):
    stage = often(folder)
    stage.world.vaults.may_write.clear()
    await stage.steps(3)
    stage.world.kill(1)
    await stage.steps(2)
    assert pinned(stage) >= {2}
    stage.world.vaults.may_write.set()
    await settle()
    assert stage.shelf.steps[0] == 2
    await stage.steps(4)
    assert pinned(stage) == set()
    await stage.finish()


@played
async def test_what_a_lost_generation_left_half_pinned_is_freed(folder: Path):
    stage = Stage(folder, World(3), workers={"min": 2, "max": 3})
    await stage.steps(2)
    stage.world.say(0, Pinned(1, 0, 2, True, 0.0))
    await settle()
    stage.world.kill(1)
    await settle()
    assert stage.world.vaults.unpinned == []
    await stage.steps(1)
    assert [one[:2] for one in stage.world.vaults.unpinned] == [("a", 1)]
    await stage.finish()


@played
async def test_pinned_steps_go_round_the_ring_and_are_held_until_a_newer_one_has(folder: Path):
    world = World(4, node_of=lambda index: "ab"[index // 2])
    stage = Stage(folder, world, workers={"min": 4})
    await stage.steps(1)
    assert {a.remote for a in stage.newest.values()} == {True}
    for step in (1, 2):
        for rank in range(4):
            world.say(rank, Pinned(1, rank, step, False, 0.0))
        await settle()
        await stage.steps(1)
    copied = [(node, [(s.rank, s.step) for s in slots]) for node, slots in world.vaults.copied]
    assert copied[:2] == [("b", [(0, 1), (1, 1)]), ("a", [(2, 1), (3, 1)])]
    assert sorted(world.vaults.unpinned) == [("a", 1, 1), ("b", 1, 1)]
    await stage.finish()


@played
async def test_a_lost_node_costs_the_steps_since_the_last_copy(folder: Path):
    world = World(4, node_of=lambda index: "ab"[index // 2])
    stage = Stage(folder, world, workers={"min": 2, "max": 4})
    await stage.steps(3)
    for rank, process in enumerate(world.members):
        assert process.assign is not None
        world._mirror(process, process.assign, 3, pin=True)
        world.say(process.info.index, Pinned(1, rank, 3, False, 0.0))
    await stage.steps(2)
    world.drop_node("b")
    await settle()
    restores = [a.restore for a in stage.newest.values()]
    assert {one.step for one in restores if one} == {3}
    assert {slot.node_id for one in restores if one for slot in one.slots} == {"a"}
    result = await stage.finish()
    assert (result.steps, result.metrics["steps_redone"]) == (4, 2)


@played
async def test_a_stop_writes_a_last_checkpoint_at_the_end_of_the_step(folder: Path):
    stage = often(folder, every=100)
    await stage.steps(6)
    stage.controller.post_event(machine.StopRequested())
    await settle()
    assert stage.states[-1] is State.STOPPING
    assert stage.world.step()
    await settle()
    assert stage.shelf.steps == [7]
    with pytest.raises(JobStoppedError, match="after step 7"):
        await stage.result()


@played
async def test_a_stop_that_cannot_wait_for_the_step_keeps_the_one_before(folder: Path):
    stage = often(folder, every=100, checkpoint={"grace_period_s": 10.0})
    await stage.steps(6)
    stage.controller.post_event(machine.StopRequested())
    await stage.clock.turn(5)
    assert stage.shelf.steps == [6]
    with pytest.raises(JobStoppedError):
        await stage.result()


@played
async def test_a_death_during_the_stop_does_not_cost_the_last_checkpoint(folder: Path):
    stage = often(folder, every=100)
    await stage.steps(6)
    stage.controller.post_event(machine.StopRequested())
    await settle()
    stage.world.kill(1)
    await settle()
    assert stage.shelf.steps == [6]
    with pytest.raises(JobStoppedError):
        await stage.result()


@played
async def test_a_stop_takes_no_longer_than_its_notice(folder: Path):
    stage = often(folder, every=100, checkpoint={"grace_period_s": 10.0})
    await stage.steps(6)
    stage.world.vaults.may_write.clear()
    stage.controller.post_event(machine.StopRequested())
    await stage.clock.turn(9.9)
    assert not stage.run.done()
    await stage.clock.turn(0.1)
    with pytest.raises(JobStoppedError):
        await stage.result()
    (told,) = stage.notebook.of(CheckpointFailed)
    assert told.again_in_s is None


@played
async def test_a_stop_writes_nothing_that_is_stored_already(folder: Path):
    stage = often(folder, every=3)
    await stage.steps(2)
    stage.controller.post_event(machine.StopRequested())
    await settle()
    assert stage.world.step()
    await settle()
    assert stage.shelf.steps == [3]
    with pytest.raises(JobStoppedError):
        await stage.result()
