"""Whole jobs on a real Ray cluster, through the Python job API."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.job.api import Job
from rayzero.orchestrator.job_events import (
    FaultDetected,
    JobWarning,
    Repaired,
    StateEntered,
    WorkersReady,
)
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.spec import Workers
from rayzero.workers.messages import LogLine
from tests.integration.conftest import CPUS
from tests.integration.jobs import streamed
from tests.orchestrator.support import EventLog
from tests.support.nccl_like.settings import from_environment

pytestmark = pytest.mark.slow
JOBS = "tests.integration.jobs.plain"


@pytest.fixture
def event_log(no_leaks: None) -> EventLog:
    """Observer of a test's jobs."""
    return EventLog()


def make_job(function: Any, folder: Path, **changes: Any) -> Job:
    settings: dict[str, Any] = {
        "workers": Workers(min=2),
        "steps": 20,
        "checkpoint": {"path": str(folder)},
    }
    entrypoint = f"{JOBS}:{function}" if isinstance(function, str) else function
    return Job("job", entrypoint, **(settings | changes))


def test_function_from_the_calling_script(
    event_log: EventLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Starts as many workers as fit and prints their output to the caller of `run`."""

    def train(ctx: Any) -> dict[str, Any]:
        print(f"hello from {ctx.rank} of {ctx.world_size}")
        for step in range(1, ctx.steps + 1):
            ctx.report(step=step, loss=1 / step, tokens=10)
        names = ("OMP_NUM_THREADS", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE")
        return {"folder": os.getcwd(), "environment": [os.environ[name] for name in names]}

    workers = Workers(min=1, max=8, cpus=2, env={"NCCL_NVLS_ENABLE": "2"})
    result = make_job(train, tmp_path, workers=workers).run()
    assert result.metrics["folder"] == os.getcwd()
    assert result.metrics["environment"] == ["2", "2", "1"]
    assert result.metrics["loss"] == {"first": 1.0, "last": 0.05}
    assert (result.steps, result.metrics["world_size"]) == (20, CPUS // 2)
    lines = capsys.readouterr().out.splitlines()
    assert "[rank 0] hello from 0 of 2" in lines
    assert any(line.startswith("step 20/20 | loss 0.0500 | ") for line in lines)
    assert lines[-1] == f"summary: {tmp_path}/job/summary.json"


def test_engine_of_named_entry_point_reports_to_the_job(event_log: EventLog, tmp_path: Path):
    """The job's states, steps, output lines and summary, without a report of the function."""
    engine = {
        "train_batch_size": 6,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 2},
    }
    handle = Job(
        "job",
        "tests.integration.jobs.linear:train",
        engine=engine,
        workers=Workers(min=2),
        steps=5,
        checkpoint={"path": str(tmp_path)},
    ).submit(observer=event_log)
    assert handle.wait(200)
    result = handle.result()
    assert [event.state for event in event_log.of(StateEntered)] == [
        State.STARTING,
        State.RUNNING,
        State.SUCCEEDED,
    ]
    lines = {(line.rank, line.stream, line.text) for line in event_log.of(LogLine)}
    assert {(0, "stdout", "hello from 0 of 2"), (1, "stdout", "hello from 1 of 2")} <= lines
    assert (1, "stderr", "to stderr") in lines
    records = event_log.of(StepRecord)
    assert [record.step for record in records] == [1, 2, 3, 4, 5]
    # 3 micro-steps on each of 2 ranks
    assert {(record.world_size, record.tokens) for record in records} == {(2, 6)}
    assert all(record.gauges["lr"] == 0.01 for record in records)
    summary = result.metrics
    assert json.loads(result.summary_path.read_text()) == summary
    assert summary["answer"] == {"first": 1.5, "last": 2.5}
    assert (summary["stage"], summary["world_size"], summary["samples"]) == (2, 2, 30)
    if from_environment() is None:  # that device imports them, for torch's shape functions
        assert summary["slow_imports"] == []
    assert summary["loss"]["last"] < summary["loss"]["first"]
    assert {"model_weights", "main_grads", "process"} <= set(summary["peak_bytes"])
    assert summary["peak_bytes"]["process"] > 50e6


def test_start_timeout_without_enough_resources(event_log: EventLog, tmp_path: Path):
    workers = Workers(min=CPUS + 1, start_timeout_s=1.5)
    with pytest.raises(JobFailedError, match=r"room for 4 of at least 5 workers .* after 1\.5 s"):
        make_job("train_forever", tmp_path, workers=workers).run(observer=event_log)


def test_long_call_is_waited_for_and_its_function_called_in_a_new_process(
    event_log: EventLog, tmp_path: Path
):
    """It has read its batches ahead, so that it does not outlive its generation; and it catches
    all that is raised, so that it would not end."""
    job = Job(
        "job",
        "tests.integration.jobs.hostile:train",
        engine={"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}},
        workers=Workers(min=1, max=2),
        steps=30,
        recovery={"mirror_every": 1},
        checkpoint={"path": str(tmp_path)},
    )
    result = job.run(observer=event_log)
    assert (result.steps, result.metrics["steps_redone"]) == (30, 0)
    warnings = [warning.text for warning in event_log.of(JobWarning)]
    assert any("waiting since" in text and "to leave" in text for text in warnings)
    assert any("is called again, in new processes (ranks 0)" in text for text in warnings)
    assert [fault.cause for fault in event_log.of(FaultDetected)] == ["lost"]
    workers = [worker for ready in event_log.of(WorkersReady) for worker in ready.workers]
    assert len({worker.pid for worker in workers}) == 4, "both ranks have a new process"
    assert result.metrics["world_sizes"] == [2]


def test_replaced_file_of_a_stream_is_named(event_log: EventLog, tmp_path: Path):
    """While the job trains, and when it is resumed: one line, after one repair at most."""
    streamed.write(tmp_path / "a.parquet", 0)
    job = Job(
        "job",
        "tests.integration.jobs.streamed:train",
        workers=Workers(min=2),
        args={"file": str(tmp_path / "a.parquet")},
        engine={"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
        checkpoint={"path": str(tmp_path / "job"), "every_steps": 1},
        steps=90,
    )
    changed = r"a\.parquet, row group .* has changed since it was listed"
    for error in (changed, r"fingerprint of the data of '.*a\.parquet'"):
        with pytest.raises(JobFailedError, match=error) as it:
            job.run(observer=event_log)
        assert "Traceback" not in str(it.value)
    steps = [record.step for record in event_log.of(StepRecord)]
    assert streamed.REPLACED_AFTER <= max(steps) < 90
    assert len(event_log.of(Repaired)) <= 1
