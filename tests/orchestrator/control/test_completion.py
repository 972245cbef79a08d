"""The last checkpoint of a job whose training function has returned."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.control.checkpoints import WRITE_RETRY_BACKOFF_S
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.machine import State
from rayzero.workers.messages import Finished, Joined, StepReport
from tests.orchestrator.fake_cluster import FakeCheckpointStore, FakeCluster
from tests.orchestrator.support import Harness, settle


def start_job(folder: Path, cluster: FakeCluster, store: FakeCheckpointStore) -> Harness:
    """A job of 6 steps with checkpoints of steps 5 and 6; the fake workers pin the first only."""
    return Harness(folder, cluster, store, steps=6, checkpoint={"every_steps": 5})


@pytest.mark.parametrize("vault_lost", [False, True])
async def test_missed_last_checkpoint_is_written(folder: Path, vault_lost: bool):
    """From the vaults, or from the workers after one was lost."""
    cluster = FakeCluster(checkpoint_every=5)
    harness = await start_job(folder, cluster, FakeCheckpointStore()).trained(5)
    if vault_lost:
        cluster.kill_vault("a")
    cluster.step(last=True)
    await settle()
    assert (await harness.result()).metrics["checkpoints"] == {"written": 2, "failed": 0}
    assert [name for name, _ in cluster.commands].count("salvage") == 2 * vault_lost
    assert harness.store.steps == [5, 6]


async def test_last_checkpoint_that_cannot_be_stored_fails_the_job(folder: Path):
    store = FakeCheckpointStore()
    harness = await start_job(folder, FakeCluster(checkpoint_every=5), store).trained(5)
    assert store.steps == [5]
    attempts = len(WRITE_RETRY_BACKOFF_S) + 1
    store.errors = [RayzeroError("the folder is read-only") for _ in range(attempts)]
    harness.cluster.step(last=True)
    await harness.clock.advance(sum(WRITE_RETRY_BACKOFF_S))
    failure = await harness.fails(JobFailedError)
    assert "training has ended after step 6" in str(failure)
    assert "step 6 is not stored: the folder is read-only" in str(failure)
    assert "the newest one is of step 5 in /runs/job/step-5" in str(failure)
    assert harness.states[-1] is State.FAILED
    assert store.errors == []


@pytest.mark.parametrize("mirrors", [True, False])
async def test_last_step_of_job_without_steps_is_stored(folder: Path, mirrors: bool):
    """From the vaults, or from the workers if it was not mirrored."""

    cluster = FakeCluster(checkpoint_every=5, mirrors=mirrors)
    harness = await Harness(folder, cluster, checkpoint={"every_steps": 5}).trained(6)
    await harness.finish()
    assert harness.store.steps == [5, 7]


@pytest.mark.parametrize("memory", ["no state", "another step"])
async def test_state_that_nobody_holds_fails_the_job(folder: Path, memory: str):
    """No vault has the last step; the function may have loaded its best model."""
    cluster = FakeCluster(checkpoint_every=5, mirrors=False)
    harness = await Harness(folder, cluster, checkpoint={"every_steps": 5}).trained(6)
    for process in cluster.processes.values():
        process.holds_state = memory != "no state"
        process.memory_step = 3
    cluster.step(last=True)
    await settle()
    await harness.fails(JobFailedError, "step 7 is not stored: no complete copy of its state is l")
    assert harness.store.steps == [5]


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


async def test_function_without_engine_has_nothing_to_store(folder: Path):
    cluster = FakeCluster()
    for process in cluster.processes.values():
        process.engine = False
    harness = await start_job(folder, cluster, FakeCheckpointStore()).trained(5)
    await harness.finish()
    assert harness.store.steps == []


async def test_step_that_is_retried_gives_way_to_the_last_one(folder: Path):
    """The end waits for one checkpoint, not for each that is due."""
    store = FakeCheckpointStore()
    harness = start_job(folder, FakeCluster(checkpoint_every=5), store)
    store.errors = [RayzeroError("the folder is read-only") for _ in range(2)]
    await harness.steps(5)
    harness.cluster.step(last=True)
    await harness.clock.advance(WRITE_RETRY_BACKOFF_S[0])
    assert (await harness.result()).metrics["checkpoints"] == {"written": 1, "failed": 2}
    assert store.steps == [6]


async def test_checkpoint_is_stored_at_once_after_the_folder_was_removed(folder: Path):
    store = FakeCheckpointStore()
    harness = await start_job(folder, FakeCluster(checkpoint_every=2), store).trained(3)
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


async def test_removed_checkpoint_is_not_the_newest_any_more(folder: Path):
    store = FakeCheckpointStore()
    harness = await start_job(folder, FakeCluster(checkpoint_every=5), store).trained(5)
    store.steps.clear()
    attempts = len(WRITE_RETRY_BACKOFF_S) + 1
    store.errors = [RayzeroError("the folder is read-only") for _ in range(2 * attempts)]
    harness.controller.on_folder_removed()
    harness.cluster.step(last=True)
    await harness.clock.advance(2 * sum(WRITE_RETRY_BACKOFF_S))
    await harness.fails(JobFailedError, "there is no other one")
