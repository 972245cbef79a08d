"""The controller without faults: start, stop, results and errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayzero.engine.errors import ConfigError, RayzeroError
from rayzero.orchestrator.errors import JobFailedError, WorkerStartError
from rayzero.orchestrator.event_text import summary_lines
from rayzero.orchestrator.job_events import (
    FaultDetected,
    JobWarning,
    ResourcesAwaited,
    WorkersReady,
)
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.policies.recovery import CheckpointRef
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.spec import CheckpointSpec
from rayzero.workers.messages import (
    CrashKind,
    Finished,
    LogLine,
    StepReport,
    WorkerInfo,
)
from tests.orchestrator.fake_cluster import FakeCheckpointStore, FakeCluster
from tests.orchestrator.support import Harness, settle

GRACE_S = CheckpointSpec().grace_period_s


def finished(rank: int, **result: object) -> Finished:
    return Finished(1, rank, result or None, {"tokens": 5}, 1000 + rank)


async def test_job_runs_to_summary(folder: Path):
    harness = await Harness(folder).started()
    assert harness.states == [State.STARTING, State.RUNNING]
    for rank in (0, 1):
        gauges = {"loss": 2.0 + rank, "step_s": 0.5, "bytes/slots": 64.0}
        harness.cluster.send(
            rank, LogLine(rank, "stdout", "hello"), StepReport(1, rank, 1, {"tokens": 50}, gauges)
        )
    await settle()
    for rank in (0, 1):
        harness.cluster.send(rank, finished(rank, score=rank, steps="many", loss=0.5))
    await settle()
    result = await harness.result()
    assert harness.states[-1] is State.SUCCEEDED
    assert result.metrics == {
        "job": "job",
        "steps": 1,
        "world_size": 2,
        "stage": None,
        "loss": 0.5,
        "tokens_per_s": 200.0,
        "seconds": 0.0,
        "peak_bytes": {"process": 1001, "slots": 64},
        "world_sizes": [2],
        "faults": {},
        "repairs": 0,
        "steps_redone": 0,
        "checkpoints": {"written": 0, "failed": 0},
        "newest_checkpoint": None,
        "resumed_from": None,
        "steps_trained": 1,
        "score": 0,
    }
    (record,) = harness.log.of(StepRecord)
    assert (record.step, record.tokens_per_s) == (1, 200.0)
    assert [line.rank for line in harness.log.of(LogLine)] == [0, 1]
    assert harness.log.of(WorkersReady) == [WorkersReady(tuple(harness.cluster.initial_workers))]


async def test_assignments_have_rank_store_and_vault(folder: Path):
    harness = await Harness(folder, "aba", workers=(3, 3)).started()
    assignments = [harness.assignments[worker] for worker in (0, 2, 1)]  # ordered by node
    ranks = [(a.rank, a.local_rank, a.local_world_size) for a in assignments]
    assert ranks == [(0, 0, 2), (1, 1, 2), (2, 0, 1)]
    common = {(a.generation, a.world_size, a.store_host, a.store_port) for a in assignments}
    assert common == {(1, 3, "10.0.0.0", 4000)}
    assert [a.vault for a in assignments] == ["vault-a-1", "vault-a-1", "vault-b-1"]
    assert {a.restore for a in assignments} == {None}


@pytest.mark.parametrize(
    ("kind", "text", "error"),
    [
        ("user", "ValueError", JobFailedError),
        ("data", "'/no/such' does not exist", JobFailedError),
        ("config", "the batch sizes disagree", ConfigError),
    ],
)
async def test_error_before_first_step_fails_job(
    folder: Path, kind: CrashKind, text: str, error: type[RayzeroError]
):
    harness = await Harness(folder).started()
    await harness.crash(1, kind, text)
    caught = await harness.fails(error, text)
    (fault,) = harness.log.of(FaultDetected)
    assert fault.is_fatal, "the error tells the same"
    if kind == "user":
        assert "in step 1 on rank 1" in str(caught)
        assert caught.traceback == "the user's frames"


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ({"start_error": JobFailedError("no room")}, "no room"),
        ({"open_store": None}, "rayzero itself failed: TypeError"),
    ],
)
async def test_error_before_the_first_generation_fails_job(
    folder: Path, broken: dict[str, Any], error: str
):
    cluster = FakeCluster()
    vars(cluster).update(broken)
    harness = await Harness(folder, cluster).started()
    await harness.fails(JobFailedError, error)
    assert harness.states == [State.STARTING, State.FAILED]


@pytest.mark.parametrize("max_faults", [1, 2])
async def test_workers_that_end_while_starting_use_the_fault_budget(folder: Path, max_faults: int):
    cluster = FakeCluster()
    cluster.start_failures = [
        WorkerStartError("killed", WorkerInfo(worker, "a", "host-a", "", 0), False, retry_in_s=1)
        for worker in (7, 8)
    ]
    harness = await Harness(folder, cluster, recovery={"max_faults": max_faults}).started()
    if max_faults == 1:
        await harness.fails(JobFailedError, r"(?s)host-a was lost.*before that.*max_faults")
        return
    texts = [f"worker {n} on node host-a was lost before the first step: killed" for n in (7, 8)]
    assert [fault.text for fault in harness.log.of(FaultDetected)] == texts
    await harness.steps(1)
    assert (await harness.finish()).metrics["faults"] == {"lost": 2}


async def test_job_that_queues_says_what_it_waits_for(folder: Path):
    cluster = FakeCluster()
    cluster.may_start.clear()
    text = "2 CPUs: held by job a (2 CPUs)"
    cluster.awaited = [text, text]
    harness = await Harness(folder, cluster).started()
    assert harness.controller.status().waiting_for == text
    assert harness.telemetry.snapshot()["waiting_for"] == text
    cluster.may_start.set()
    await settle()
    assert harness.controller.status().waiting_for == ""
    assert harness.telemetry.snapshot()["waiting_for"] is None
    said = [event.text for event in harness.log.of(ResourcesAwaited)]
    assert said == [text, ""]  # not again while nothing changes
    await harness.steps(1)


async def test_job_with_nothing_left_says_so_before_workers_start_and_at_the_end(folder: Path):
    cluster = FakeCluster()
    cluster.may_start.clear()
    harness = await Harness(folder, cluster, FakeCheckpointStore(40), steps=40).started()
    (before,) = harness.log.of(JobWarning)
    assert "no step is left to train" in before.text
    cluster.may_start.set()
    await settle()
    for rank in (0, 1):
        cluster.send(rank, finished(rank))
    await settle()
    result = await harness.result()
    assert "no step was trained" in result.note
    assert harness.log.of(JobWarning) == [before]
    assert "no step was trained (after 40 steps)" in next(summary_lines(result))


async def test_checkpoint_of_another_job_is_not_offered_as_this_jobs(folder: Path):
    store = FakeCheckpointStore()
    harness = Harness(folder, FakeCluster(), store, checkpoint={"resume": "/runs/other"})

    async def resolve() -> CheckpointRef:
        return CheckpointRef(40, "/runs/other/step-40")

    store.resolve_resume = resolve  # type: ignore[method-assign]
    await harness.steps(2)
    assert harness.controller.status().checkpoint_step is None
    metrics = (await harness.finish()).metrics
    assert metrics["newest_checkpoint"] is None
    assert metrics["resumed_from"] == "/runs/other/step-40"


async def test_rejected_resume_starts_no_worker(folder: Path):
    store = FakeCheckpointStore()
    store.resume_error = ConfigError("there are checkpoints")
    cluster = FakeCluster()
    cluster.may_start.clear()
    harness = await Harness(folder, cluster, store).started()
    await harness.fails(ConfigError, "there are checkpoints")


@pytest.mark.parametrize(
    ("cpus", "gpus", "reported"),
    [(1, 1, True), (13, 1, False), (1, 0, False), (None, 1, False)],  # None: what the node has
)
async def test_offloaded_update_on_few_threads_is_reported(
    folder: Path, cpus: int | None, gpus: int, reported: bool
):
    """Ten times slower, on a node whose other cores idle."""
    cluster = FakeCluster()
    cluster.initial_workers = [replace(it, node="a", cores=26) for it in cluster.initial_workers]
    engine = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    workers = {"min": 2, "cpus": cpus, "gpus": gpus}
    harness = await Harness(folder, cluster, workers=workers, engine=engine).started()
    expected = "1 CPU threads (workers.cpus), and node a has 13 cores for each of its workers"
    assert (expected in harness.warnings, bool(harness.warnings)) == (reported, reported)


async def test_scaling_to_invalid_world_size_is_rejected(folder: Path):
    engine = {"train_batch_size": 4, "zero_optimization": {"stage": 1}}
    harness = await Harness(folder, engine=engine).trained(1)
    with pytest.raises(ConfigError, match="train_batch_size 4 is enough for 4 workers"):
        harness.controller.scale(2, 5)
    assert harness.cluster.resized == []
