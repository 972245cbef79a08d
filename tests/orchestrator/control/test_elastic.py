"""Changes of the world size without faults: new workers, scaling, spares, draining nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.control.elastic import DRAIN_POLL_INTERVAL_S, JOIN_BATCH_S
from rayzero.orchestrator.control.vaults import CLOSE_UNUSED_AFTER_S
from rayzero.orchestrator.errors import JobStoppedError, WorkerLostError
from rayzero.orchestrator.job_events import FaultDetected, JobWarning, Resized, WorkersReady
from rayzero.orchestrator.machine import State
from rayzero.workers.messages import StepDivided
from tests.orchestrator.fake_cluster import FakeCluster
from tests.orchestrator.support import Harness, settle


async def drain(harness: Harness) -> None:
    harness.cluster.draining = frozenset({"b"})
    await harness.clock.advance(DRAIN_POLL_INTERVAL_S)


async def test_new_workers_join_in_batch_at_step_boundary(folder: Path):
    harness = await Harness(folder, workers=(2, 4)).trained(3)
    await harness.join(wait_s=JOIN_BATCH_S / 2)
    await harness.join()
    assert harness.states[-1] is State.RESIZING
    assert harness.cluster.can_step  # training continues until all workers have the drain command
    await harness.steps(2)
    assert sorted(harness.assignments) == [0, 1, 2, 3]
    (resized,) = harness.log.of(Resized)
    assert (resized.reason, resized.step) == ("from 2 to 4 workers", 4)
    assert list(resized.seconds) == [
        *("drain", "select_step", "select_members", "rendezvous", "load", "recompute")
    ]
    result = await harness.finish()
    assert (result.steps, result.metrics["steps_redone"]) == (6, 0)
    assert result.metrics["world_sizes"] == [2, 4]


async def test_spare_replaces_lost_worker(folder: Path):
    harness = await Harness(folder, 3, workers={"min": 2, "max": 2, "spares": 1}).trained(3)
    assert harness.plan.resources.max_workers == 3
    assert sorted(harness.assignments) == [0, 1]
    await harness.kill(0)
    assert harness.running == [1, 2]
    assert {a.world_size for a in harness.assignments.values()} == {2}


async def test_only_ranks_that_divide_the_step_train(folder: Path):
    """Trainer's step of 4 micro-batches: after a loss 2 of 3 train, and 4 with a replacement."""
    harness = await Harness(folder, 4, workers=(2, 4)).trained(2)
    harness.cluster.send(0, StepDivided(harness.assignments[0].generation, 0, 4))
    await harness.steps(1)
    await harness.kill(1)
    assert harness.states[-1] is State.RUNNING
    await harness.steps(2)
    assert len(harness.assignments) == 2
    await harness.join()
    await harness.steps(2)
    assert len(harness.assignments) == 4
    result = await harness.finish()
    assert result.metrics["world_sizes"] == [4, 2, 4]
    assert result.metrics["steps_redone"] == 0
    (warning,) = harness.log.of(JobWarning)
    assert "was lost" in warning.text, "and nothing about workers that cannot train"


async def test_workers_that_can_never_train_are_told(folder: Path):
    harness = await Harness(folder, 2, workers=(2, 4)).trained(1)
    harness.cluster.send(0, StepDivided(harness.assignments[0].generation, 0, 2))
    await harness.steps(1)
    (warning,) = harness.log.of(JobWarning)
    assert "a step has 2 micro-batches" in warning.text
    assert "of up to 4 workers (workers.max) 2 can train" in warning.text


async def test_replacement_on_a_gpu_waits_for_the_lost_process(folder: Path):
    """Its GPU memory is freed before it exits, which may take long."""
    workers = {"min": 2, "max": 4, "gpus": 1, "start_timeout_s": 50}
    harness = await Harness(folder, 4, workers=workers).trained(3)
    cluster = harness.cluster
    cluster.vaults.still_running = {cluster.processes[worker].info.pid for worker in (1, 2)}
    cluster.kill(1)
    await harness.kill(2)
    assert harness.states[-1] is State.RUNNING, "survivors have GPUs of their own"
    await harness.steps(2)
    await harness.clock.advance(40)
    assert cluster.replaced == []
    cluster.vaults.still_running.remove(cluster.processes[1].info.pid)
    await harness.clock.advance(1)
    assert [worker for worker, _, _ in cluster.replaced] == [1]
    await harness.clock.advance(15)
    assert [worker for worker, _, _ in cluster.replaced] == [1, 2], "nothing ends that one"
    assert "was killed, and still runs" in harness.warnings


async def test_lost_spare_is_replaced_without_repair(folder: Path):
    harness = await Harness(
        folder, 3, workers={"min": 2, "spares": 1}, recovery={"max_faults": 0}
    ).trained(3)
    await harness.kill(2)
    assert harness.states[-1] is State.RUNNING
    assert harness.cluster.replaced == [(2, 0.0, ())]
    (fault,) = harness.log.of(FaultDetected)
    assert fault.rank is None
    assert "worker 2 on node host-a" in fault.text


async def test_scaling_down_releases_workers_after_resize(folder: Path):
    harness = await Harness(folder, 4, workers=(2, 4)).trained(2)
    assert harness.controller.scale(2, 2) == "job: 2 workers wanted; it has 4"
    await settle()
    assert harness.cluster.resized == [(2, 2)]
    assert harness.states[-1] is State.RESIZING
    assert dismissed(harness) == []
    await harness.steps(1)
    assert sorted(harness.assignments) == [0, 1]
    assert dismissed(harness) == [2, 3]
    result = await harness.finish()
    assert result.metrics["faults"] == {}
    assert harness.log.of(FaultDetected) == []


def dismissed(harness: Harness) -> list[int]:
    return [worker for command, worker in harness.cluster.commands if command == "dismiss"]


async def test_scaling_up_continues_training_until_new_workers_are_ready(folder: Path):
    harness = await Harness(folder).trained(1)
    harness.controller.scale(3, 5)
    await harness.steps(3)
    assert harness.states[-1] is State.RUNNING
    await harness.join()
    await harness.steps(1)
    assert sorted(harness.assignments) == [0, 1, 2]


async def test_scaling_to_invalid_world_size_is_rejected(folder: Path):
    engine = {"train_batch_size": 4, "zero_optimization": {"stage": 1}}
    harness = await Harness(folder, engine=engine).trained(1)
    with pytest.raises(ConfigError, match="train_batch_size 4 is enough for 4 workers"):
        harness.controller.scale(2, 5)
    assert harness.cluster.resized == []


async def test_workers_of_draining_node_are_replaced_before_it_is_lost(folder: Path):
    harness = await Harness(folder, "aabb", workers=(2, 4), recovery={"max_faults": 0}).trained(3)
    await drain(harness)
    assert harness.states[-1] is State.RESIZING
    await harness.steps(1)
    assert sorted(harness.assignments) == [0, 1]
    assert harness.cluster.replaced == [(2, 0.0, ("b",)), (3, 0.0, ("b",))]
    harness.cluster.lose_node("b")
    await settle()
    await harness.steps(1)
    (resized,) = harness.log.of(Resized)
    assert resized.reason == "a node is draining"
    assert "node host-b is draining" in harness.warnings
    assert (await harness.finish()).metrics["faults"] == {}


async def test_worker_lost_on_draining_node_does_not_count_as_fault(folder: Path):
    harness = await Harness(folder, "aab", workers=(2, 3), recovery={"max_faults": 0}).trained(3)
    await drain(harness)
    harness.cluster.kill(2)  # before the current step has ended
    await settle()
    assert harness.states[-1] is State.RUNNING
    assert (await harness.finish()).metrics["faults"] == {"preempted": 1}


async def test_draining_node_is_used_until_replacements_are_ready(folder: Path):
    harness = await Harness(folder, "ab").trained(1)
    await drain(harness)
    assert harness.states[-1] is State.RUNNING
    await harness.join("a")
    await harness.steps(1)
    assert sorted(harness.assignments) == [0, 2]


async def test_job_without_engine_is_never_resized(folder: Path):
    cluster = FakeCluster(2)
    for process in cluster.processes.values():
        process.engine = False
    harness = await Harness(folder, cluster, workers=(2, 4)).trained(2)
    await harness.join(wait_s=10)
    assert harness.states[-1] is State.RUNNING


@pytest.mark.parametrize("drains", [False, True])
async def test_finishing_job_is_not_resized(folder: Path, drains: bool):
    harness = await Harness(folder, workers=(2, 4)).trained(1)
    await harness.join(wait_s=JOIN_BATCH_S if drains else 0)
    assert (harness.states[-1] is State.RESIZING) == drains
    assert harness.cluster.step(last=True)
    await harness.clock.advance(10)
    assert (await harness.result()).steps == 2


async def test_worker_lost_during_drain(folder: Path):
    harness = await Harness(folder, 3, workers=(2, 5)).trained(3)
    await harness.join()
    assert harness.states[-1] is State.RESIZING
    await harness.kill(1)
    assert harness.running == [0, 2]
    assert harness.cluster.processes[3].retired, "its function was called as rank 3 of 4"


@pytest.mark.parametrize("when", ["before", "during"])
async def test_new_worker_lost_before_or_during_resize(folder: Path, when: str):
    harness = await Harness(folder, workers=(2, 3)).trained(1)
    newcomer = await harness.join(wait_s=0 if when == "before" else JOIN_BATCH_S)
    if when == "during":
        harness.cluster.auto = False
        await harness.steps(1)
        harness.cluster.auto = True
    await harness.kill(newcomer, wait_s=JOIN_BATCH_S)
    assert harness.running == [0, 1]


async def test_new_worker_that_fails_to_start_is_reported(folder: Path):
    harness = await Harness(folder, workers=(2, 3)).trained(1)
    harness.cluster.joining.put_nowait(WorkerLostError("a worker did not start: no torch"))
    await harness.join(wait_s=0)
    assert any("no torch" in warning.text for warning in harness.log.of(JobWarning))
    assert len(harness.log.of(WorkersReady)) == 2
    await harness.stop()
    await harness.fails(JobStoppedError)


@pytest.mark.parametrize("mirrors", [True, False])
async def test_unused_vault_is_closed_once_a_newer_step_is_complete_without_it(
    folder: Path, mirrors: bool
):
    """A step may take a minute, and a mirror be due after several."""
    cluster = FakeCluster("aab", mirrors=mirrors)
    harness = await Harness(folder, cluster, workers=(2, 3)).trained(3)
    await drain(harness)
    await harness.steps(2)
    assert sorted(harness.assignments) == [0, 1]
    if not mirrors:
        for _ in range(2):
            await harness.clock.advance(CLOSE_UNUSED_AFTER_S)
            await harness.steps(1)
            assert cluster.vaults.closed == []  # it holds a part of the newest complete step
        cluster.mirrors = True
        await harness.steps(2)
    assert cluster.vaults.closed == []
    await harness.clock.advance(CLOSE_UNUSED_AFTER_S)
    await harness.steps(1)
    assert cluster.vaults.closed == ["b"]
    assert "vault" not in harness.warnings
