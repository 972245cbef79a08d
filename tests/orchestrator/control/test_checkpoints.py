"""Checkpoints and replicas in the background, and the last one of a job that stops or ends."""

from __future__ import annotations

from pathlib import Path

from rayzero.orchestrator.job_events import Checkpointed, CheckpointFailed
from rayzero.orchestrator.machine import State
from rayzero.workers.messages import Finished, Joined, Pinned, StepReport
from tests.orchestrator.fake_cluster import FakeCheckpointStore, FakeCluster
from tests.orchestrator.support import Harness, settle


async def test_pinned_step_is_written_and_unpinned(folder: Path):
    cluster, store = FakeCluster(3, checkpoint_every=2), FakeCheckpointStore()
    store.keep = 1
    harness = Harness(folder, cluster, store, workers=(2, 3), checkpoint={"every_steps": 2})
    await harness.steps(5)
    assert store.steps == [4]
    assert store.prunes == 2
    assert [it["step"] for it in harness.telemetry.snapshot()["checkpoints"]] == [4]
    assert not any(slot.pinned for slot in cluster.vaults.by_node["a"].slots.values())
    events = [(it.step, it.nbytes, it.stopped_s) for it in harness.log.of(Checkpointed)]
    assert events == [(2, 192, 0.01), (4, 192, 0.01)]


async def test_incomplete_pins_of_lost_generation_are_released(folder: Path):
    harness = await Harness(folder, 3, workers=(2, 3)).trained(2)
    await harness.send(0, Pinned(1, 0, 2, 0.0))
    await harness.kill(1)
    assert harness.cluster.vaults.unpinned == []
    await harness.steps(1)
    unpinned = [(node, generation) for node, generation, _ in harness.cluster.vaults.unpinned]
    assert unpinned == [("a", 1)]


async def test_limit_of_a_write_grows_with_its_size(folder: Path):
    harness = await Harness(folder, 2, workers=(2, 2), checkpoint={"every_steps": 50}).trained(2)
    harness.cluster.vaults.may_write.clear()
    for rank in range(2):  # at 10 MB/s: 400 s
        harness.cluster.send(rank, Pinned(1, rank, 2, 0.0, nbytes=2 * 10**9))
    await harness.clock.advance(990)
    assert harness.log.of(CheckpointFailed) == []
    await harness.clock.advance(11)
    (failed,) = harness.log.of(CheckpointFailed)
    assert "did not finish in time" in failed.text
    harness.cluster.vaults.may_write.set()
    await harness.clock.advance(1)
    assert harness.store.steps == [2]


async def test_ranks_learn_where_their_replicas_go_and_say_which_there_are(folder: Path):
    harness = await Harness(folder, "aabb", workers=(3, 4)).trained(2)
    assert [a.replica_nodes for a in harness.assignments.values()] == [("b",)] * 2 + [("a",)] * 2

    def replicated() -> int | None:
        step: int | None = harness.telemetry.snapshot()["replicas"]["step_on_other_nodes"]
        return step

    harness.cluster.replicate(2)
    assert replicated() is None
    await harness.steps(2)
    assert replicated() == 2
    await harness.kill(3)
    await harness.steps(1)
    assert replicated() == 2
    harness.cluster.replicate(5)
    await harness.steps(1)
    assert replicated() == 5


async def test_lost_node_costs_steps_since_last_replica(folder: Path):
    harness = await Harness(folder, "aabb", workers=(2, 4)).trained(3)
    harness.cluster.replicate(3)
    await harness.steps(2)
    harness.cluster.lose_node("b")
    await settle()
    restores = [a.restore for a in harness.assignments.values()]
    assert {restore.step for restore in restores if restore} == {3}
    slots = [slot for restore in restores if restore for slot in restore.slots]
    assert {slot.node_id for slot in slots} == {"a"}
    assert {a.replica_nodes for a in harness.assignments.values()} == {()}, "there is no other node"
    result = await harness.finish()
    assert (result.steps, result.metrics["steps_redone"]) == (4, 2)


async def test_function_that_returns_at_once_succeeds(folder: Path):
    """The messages of its whole life arrive together."""
    cluster = FakeCluster(auto=False)
    harness = await Harness(folder, cluster).started()
    for rank in range(2):
        report = StepReport(1, rank, 1, {}, {"step_s": 0.1})
        cluster.send(rank, Joined(1, rank), report, Finished(1, rank, {}, {}, 1))
    await settle()
    result = await harness.result()
    assert result.steps == 1
    assert harness.states == [State.STARTING, State.RUNNING, State.SUCCEEDED]


async def test_checkpoint_is_stored_at_once_after_the_folder_was_removed(folder: Path):
    store = FakeCheckpointStore()
    cluster, checkpoint = FakeCluster(checkpoint_every=2), {"every_steps": 5}
    harness = await Harness(folder, cluster, store, steps=6, checkpoint=checkpoint).trained(3)
    assert store.steps == [2]

    def find_removed() -> None:
        """What the lease's holder does at its next write."""
        if store.steps == [2]:
            store.steps.clear()
            harness.controller.on_folder_removed()

    store.check_lease = find_removed
    harness.controller.on_folder_removed()
    await settle()
    assert store.steps == [3]
    assert harness.controller.status().checkpoint_step == 3
    await harness.steps(2)
    await harness.finish()
    assert store.steps == [3, 4, 6]
