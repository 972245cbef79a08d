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
from tests.orchestrator.fake_cluster import FakeCluster
from tests.orchestrator.support import Harness, async_test, settle

FULL = RayzeroError("the disk is full")


def often(folder: Path, every: int = 2, **changes: object) -> Harness:
    checkpoint = {"every_steps": every} | dict(changes.pop("checkpoint", {}))  # type: ignore[call-overload]
    cluster = FakeCluster(3, checkpoint_every=every)
    return Harness(folder, cluster, workers={"min": 2, "max": 3}, checkpoint=checkpoint, **changes)


def pinned(harness: Harness) -> set[int]:
    return {
        slot.step
        for vault in harness.cluster.vaults.by_node.values()
        for slot in vault.slots.values()
        if slot.pinned
    }


@async_test
async def test_a_pinned_step_becomes_a_checkpoint_and_is_freed(folder: Path):
    harness = often(folder)
    await harness.steps(5)
    assert harness.store.steps == [2, 4]
    assert harness.store.prunes == 2
    assert pinned(harness) == set()
    told = harness.log.of(Checkpointed)
    assert [(one.step, one.nbytes, one.stopped_s) for one in told] == [
        (2, 192, 0.01),
        (4, 192, 0.01),
    ]
    result = await harness.finish()
    assert result.metrics["checkpoints"] == {"written": 3, "failed": 0}


@async_test
async def test_training_continues_while_a_checkpoint_is_written(folder: Path):
    harness = often(folder)
    harness.cluster.vaults.may_write.clear()
    await harness.steps(7)
    assert pinned(harness) == {2}
    assert harness.store.steps == []
    harness.cluster.vaults.may_write.set()
    await settle()
    assert harness.store.steps == [2]
    await harness.finish()


@async_test
async def test_the_job_ends_when_its_last_checkpoint_is_stored(folder: Path):
    harness = often(folder)
    await harness.steps(1)
    harness.cluster.vaults.may_write.clear()
    await settle()
    assert harness.cluster.step(last=True)
    await harness.clock.advance(30)
    assert not harness.run.done()
    harness.cluster.vaults.may_write.set()
    await settle()
    assert (await harness.result()).metrics["checkpoints"]["written"] == 1


@async_test
async def test_a_failed_write_is_warned_of_retried_and_counted(folder: Path):
    harness = often(folder)
    harness.cluster.vaults.write_errors = [FULL, FULL]
    await harness.steps(3)
    (told,) = harness.log.of(CheckpointFailed)
    assert (told.step, told.text, told.tries, told.again_in_s) == (2, "the disk is full", 1, 1.0)
    await harness.clock.advance(WRITE_RETRY_BACKOFF_S[0])
    await harness.clock.advance(WRITE_RETRY_BACKOFF_S[1])
    assert harness.store.steps == [2]
    assert (await harness.finish()).metrics["checkpoints"] == {"written": 2, "failed": 2}


@async_test
async def test_a_checkpoint_is_abandoned_after_some_attempts_and_the_next_one_is_written(
    folder: Path,
):
    harness = often(folder)
    harness.store.errors = [FULL] * (len(WRITE_RETRY_BACKOFF_S) + 1)
    await harness.steps(3)
    await harness.clock.advance(sum(WRITE_RETRY_BACKOFF_S))
    told = harness.log.of(CheckpointFailed)
    assert [one.again_in_s for one in told] == [*WRITE_RETRY_BACKOFF_S, None]
    assert pinned(harness) == set()
    await harness.steps(1)
    assert harness.store.steps == [4]
    await harness.finish()


@async_test
async def test_a_slot_that_a_vault_has_lost_is_not_requested_again(folder: Path):
    harness = often(folder)
    harness.cluster.vaults.write_errors = [DataError("the slot is gone")]
    await harness.steps(3)
    (told,) = harness.log.of(CheckpointFailed)
    assert (told.step, told.tries, told.again_in_s) == (2, 1, None)
    await harness.finish()


@async_test
async def test_a_checkpoint_under_way_survives_a_repair(folder: Path):
    harness = often(folder)
    harness.cluster.vaults.may_write.clear()
    await harness.steps(3)
    harness.cluster.kill(1)
    await harness.steps(2)
    assert pinned(harness) >= {2}
    harness.cluster.vaults.may_write.set()
    await settle()
    assert harness.store.steps[0] == 2
    await harness.steps(4)
    assert pinned(harness) == set()
    await harness.finish()


@async_test
async def test_incomplete_pins_of_a_lost_generation_are_released(folder: Path):
    harness = Harness(folder, FakeCluster(3), workers={"min": 2, "max": 3})
    await harness.steps(2)
    harness.cluster.send(0, Pinned(1, 0, 2, True, 0.0))
    await settle()
    harness.cluster.kill(1)
    await settle()
    assert harness.cluster.vaults.unpinned == []
    await harness.steps(1)
    assert [one[:2] for one in harness.cluster.vaults.unpinned] == [("a", 1)]
    await harness.finish()


@async_test
async def test_pinned_steps_are_replicated_in_a_ring_and_kept_until_a_newer_one_is(folder: Path):
    cluster = FakeCluster(4, node_of=lambda index: "ab"[index // 2])
    harness = Harness(folder, cluster, workers={"min": 4})
    await harness.steps(1)
    assert {a.remote for a in harness.assignments.values()} == {True}
    for step in (1, 2):
        for rank in range(4):
            cluster.send(rank, Pinned(1, rank, step, False, 0.0))
        await settle()
        await harness.steps(1)
    copied = [
        (node, [(s.rank, s.step) for s in slots]) for node, slots in cluster.vaults.replicated
    ]
    assert copied[:2] == [("b", [(0, 1), (1, 1)]), ("a", [(2, 1), (3, 1)])]
    assert sorted(cluster.vaults.unpinned) == [("a", 1, 1), ("b", 1, 1)]
    await harness.finish()


@async_test
async def test_a_lost_node_costs_the_steps_since_the_last_copy(folder: Path):
    cluster = FakeCluster(4, node_of=lambda index: "ab"[index // 2])
    harness = Harness(folder, cluster, workers={"min": 2, "max": 4})
    await harness.steps(3)
    for rank, process in enumerate(cluster.members):
        assert process.assign is not None
        cluster._mirror(process, process.assign, 3, pin=True)
        cluster.send(process.info.index, Pinned(1, rank, 3, False, 0.0))
    await harness.steps(2)
    cluster.lose_node("b")
    await settle()
    restores = [a.restore for a in harness.assignments.values()]
    assert {one.step for one in restores if one} == {3}
    assert {slot.node_id for one in restores if one for slot in one.slots} == {"a"}
    result = await harness.finish()
    assert (result.steps, result.metrics["steps_redone"]) == (4, 2)


@async_test
async def test_a_stop_writes_a_last_checkpoint_at_the_end_of_the_step(folder: Path):
    harness = often(folder, every=100)
    await harness.steps(6)
    harness.controller.post_event(machine.StopRequested())
    await settle()
    assert harness.states[-1] is State.STOPPING
    assert harness.cluster.step()
    await settle()
    assert harness.store.steps == [7]
    with pytest.raises(JobStoppedError, match="after step 7"):
        await harness.result()


@async_test
async def test_a_stop_that_cannot_wait_for_the_step_writes_the_one_before(folder: Path):
    harness = often(folder, every=100, checkpoint={"grace_period_s": 10.0})
    await harness.steps(6)
    harness.controller.post_event(machine.StopRequested())
    await harness.clock.advance(5)
    assert harness.store.steps == [6]
    with pytest.raises(JobStoppedError):
        await harness.result()


@async_test
async def test_a_death_during_the_stop_does_not_cost_the_last_checkpoint(folder: Path):
    harness = often(folder, every=100)
    await harness.steps(6)
    harness.controller.post_event(machine.StopRequested())
    await settle()
    harness.cluster.kill(1)
    await settle()
    assert harness.store.steps == [6]
    with pytest.raises(JobStoppedError):
        await harness.result()


@async_test
async def test_a_stop_takes_no_longer_than_its_notice(folder: Path):
    harness = often(folder, every=100, checkpoint={"grace_period_s": 10.0})
    await harness.steps(6)
    harness.cluster.vaults.may_write.clear()
    harness.controller.post_event(machine.StopRequested())
    await harness.clock.advance(9.9)
    assert not harness.run.done()
    await harness.clock.advance(0.1)
    with pytest.raises(JobStoppedError):
        await harness.result()
    (told,) = harness.log.of(CheckpointFailed)
    assert told.again_in_s is None


@async_test
async def test_a_stop_writes_nothing_that_is_stored_already(folder: Path):
    harness = often(folder, every=3)
    await harness.steps(2)
    harness.controller.post_event(machine.StopRequested())
    await settle()
    assert harness.cluster.step()
    await settle()
    assert harness.store.steps == [3]
    with pytest.raises(JobStoppedError):
        await harness.result()
