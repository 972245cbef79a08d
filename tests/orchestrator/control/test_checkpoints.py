"""Background checkpoints and replicas, and the last checkpoint of a stopped job."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayzero.engine.errors import DataError, RayzeroError
from rayzero.orchestrator.control.checkpoints import WRITE_RETRY_BACKOFF_S
from rayzero.orchestrator.errors import JobStoppedError
from rayzero.orchestrator.job_events import Checkpointed, CheckpointFailed
from rayzero.orchestrator.machine import State
from rayzero.workers.messages import Pinned
from tests.orchestrator.fake_cluster import FakeCluster
from tests.orchestrator.support import Harness, settle

DISK_FULL = RayzeroError("the disk is full")


def start_job(folder: Path, every: int = 2, **changes: object) -> Harness:
    checkpoint = {"every_steps": every} | dict(changes.pop("checkpoint", {}))  # type: ignore[call-overload]
    cluster = FakeCluster(3, checkpoint_every=every)
    return Harness(folder, cluster, workers={"min": 2, "max": 3}, checkpoint=checkpoint, **changes)


def pinned_steps(harness: Harness) -> set[int]:
    return {
        slot.step
        for vault in harness.cluster.vaults.by_node.values()
        for slot in vault.slots.values()
        if slot.pinned
    }


async def test_pinned_step_is_written_and_unpinned(folder: Path):
    harness = start_job(folder)
    harness.store.keep = 1
    await harness.steps(5)
    assert harness.store.steps == [4]
    assert harness.store.prunes == 2
    assert [it["step"] for it in harness.telemetry.snapshot()["checkpoints"]] == [4]
    assert pinned_steps(harness) == set()
    events = [(it.step, it.nbytes, it.stopped_s) for it in harness.log.of(Checkpointed)]
    assert events == [(2, 192, 0.01), (4, 192, 0.01)]
    result = await harness.finish()
    assert result.metrics["checkpoints"] == {"written": 3, "failed": 0}


async def test_training_continues_during_checkpoint(folder: Path):
    harness = start_job(folder)
    harness.cluster.vaults.may_write.clear()
    await harness.steps(7)
    assert pinned_steps(harness) == {2}
    assert harness.store.steps == []
    harness.cluster.vaults.may_write.set()
    await settle()
    assert harness.store.steps == [2]


async def test_job_waits_for_last_checkpoint(folder: Path):
    harness = await start_job(folder).trained(1)
    harness.cluster.vaults.may_write.clear()
    await settle()
    assert harness.cluster.step(last=True)
    await harness.clock.advance(30)
    assert not harness.run.done()
    harness.cluster.vaults.may_write.set()
    await settle()
    assert (await harness.result()).metrics["checkpoints"]["written"] == 1


async def test_failed_write_is_reported_and_retried(folder: Path):
    harness = start_job(folder)
    harness.cluster.vaults.write_errors = [DISK_FULL, DISK_FULL]
    await harness.steps(3)
    (event,) = harness.log.of(CheckpointFailed)
    assert (event.step, event.text) == (2, "the disk is full")
    assert (event.tries, event.again_in_s) == (1, 1.0)
    await harness.clock.advance(WRITE_RETRY_BACKOFF_S[0])
    await harness.clock.advance(WRITE_RETRY_BACKOFF_S[1])
    assert harness.store.steps == [2]
    assert (await harness.finish()).metrics["checkpoints"] == {"written": 2, "failed": 2}


async def test_checkpoint_is_abandoned_after_retries(folder: Path):
    harness = start_job(folder)
    harness.store.errors = [DISK_FULL] * (len(WRITE_RETRY_BACKOFF_S) + 1)
    await harness.steps(3)
    await harness.clock.advance(sum(WRITE_RETRY_BACKOFF_S))
    events = harness.log.of(CheckpointFailed)
    assert [event.again_in_s for event in events] == [*WRITE_RETRY_BACKOFF_S, None]
    assert pinned_steps(harness) == set()
    await harness.steps(1)
    assert harness.store.steps == [4]


async def test_write_of_missing_slot_is_not_retried(folder: Path):
    harness = start_job(folder)
    harness.cluster.vaults.write_errors = [DataError("the slot is gone")]
    await harness.steps(3)
    (event,) = harness.log.of(CheckpointFailed)
    assert (event.step, event.tries, event.again_in_s) == (2, 1, None)


async def test_checkpoint_in_progress_survives_repair(folder: Path):
    harness = start_job(folder)
    harness.cluster.vaults.may_write.clear()
    await harness.steps(3)
    harness.cluster.kill(1)
    await harness.steps(2)
    assert pinned_steps(harness) >= {2}
    harness.cluster.vaults.may_write.set()
    await settle()
    assert harness.store.steps[0] == 2
    await harness.steps(4)
    assert pinned_steps(harness) == set()


async def test_incomplete_pins_of_lost_generation_are_released(folder: Path):
    harness = await Harness(folder, 3, workers={"min": 2, "max": 3}).trained(2)
    await harness.send(0, Pinned(1, 0, 2, True, 0.0))
    await harness.kill(1)
    assert harness.cluster.vaults.unpinned == []
    await harness.steps(1)
    unpinned = [(node, generation) for node, generation, _ in harness.cluster.vaults.unpinned]
    assert unpinned == [("a", 1)]


async def test_limit_of_a_write_grows_with_its_size(folder: Path):
    harness = await Harness(
        folder, FakeCluster(2), workers={"min": 2}, checkpoint={"every_steps": 50}
    ).trained(2)
    harness.cluster.vaults.may_write.clear()
    for rank in range(2):  # at 10 MB/s: 400 s
        harness.cluster.send(rank, Pinned(1, rank, 2, True, 0.0, nbytes=2 * 10**9))
    await harness.clock.advance(990)
    assert harness.log.of(CheckpointFailed) == []
    await harness.clock.advance(11)
    (failed,) = harness.log.of(CheckpointFailed)
    assert "did not finish in time" in failed.text
    harness.cluster.vaults.may_write.set()
    await harness.clock.advance(1)
    assert harness.store.steps == [2]


async def test_pinned_steps_are_replicated_to_next_node(folder: Path):
    cluster = FakeCluster(4, node_of=lambda index: "ab"[index // 2])
    harness = await Harness(folder, cluster, workers={"min": 4}).trained(1)
    assert {a.remote for a in harness.assignments.values()} == {True}
    for step in (1, 2):
        for rank in range(4):
            cluster.send(rank, Pinned(1, rank, step, False, 0.0))
        await settle()
        await harness.steps(1)
    replicated = [
        (node, [(slot.rank, slot.step) for slot in slots])
        for node, slots in cluster.vaults.replicated
    ]
    assert replicated[:2] == [("b", [(0, 1), (1, 1)]), ("a", [(2, 1), (3, 1)])]
    assert sorted(cluster.vaults.unpinned) == [("a", 1, 1), ("b", 1, 1)]


async def test_lost_node_costs_steps_since_last_replica(folder: Path):
    cluster = FakeCluster(4, node_of=lambda index: "ab"[index // 2])
    harness = await Harness(folder, cluster, workers={"min": 2, "max": 4}).trained(3)
    for rank, process in enumerate(cluster.members):
        assert process.assign is not None
        cluster._mirror(process, process.assign, 3, pin=True)
        cluster.send(process.info.index, Pinned(1, rank, 3, False, 0.0))
    await harness.steps(2)
    cluster.lose_node("b")
    await settle()
    restores = [a.restore for a in harness.assignments.values()]
    assert {restore.step for restore in restores if restore} == {3}
    slots = [slot for restore in restores if restore for slot in restore.slots]
    assert {slot.node_id for slot in slots} == {"a"}
    result = await harness.finish()
    assert (result.steps, result.metrics["steps_redone"]) == (4, 2)


@pytest.mark.parametrize(("every", "steps"), [(100, 6), (3, 2)], ids=["none is due", "one is due"])
async def test_stop_writes_one_checkpoint_after_current_step(folder: Path, every: int, steps: int):
    harness = await start_job(folder, every=every).trained(steps)
    await harness.stop()
    assert harness.states[-1] is State.STOPPING
    assert harness.cluster.step()
    await settle()
    assert harness.store.steps == [steps + 1]
    await harness.fails(JobStoppedError, f"after step {steps + 1}")


@pytest.mark.parametrize("problem", ["a long step", "a lost worker"])
async def test_stop_writes_previous_step_if_current_step_does_not_end(folder: Path, problem: str):
    checkpoint = {"grace_period_s": 10.0}
    harness = await start_job(folder, every=100, checkpoint=checkpoint).trained(6)
    if problem == "a long step":
        await harness.stop(5)
    else:
        await harness.stop()
        await harness.kill(1)
    assert harness.store.steps == [6]
    await harness.fails(JobStoppedError)


async def test_stop_ends_within_grace_period(folder: Path):
    harness = await start_job(folder, every=100, checkpoint={"grace_period_s": 10.0}).trained(6)
    harness.cluster.vaults.may_write.clear()
    await harness.stop(9.9)
    assert not harness.run.done()
    await harness.clock.advance(0.1)
    await harness.fails(JobStoppedError)
    (event,) = harness.log.of(CheckpointFailed)
    assert event.again_in_s is None
