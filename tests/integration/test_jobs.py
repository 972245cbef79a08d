"""Whole jobs on a real Ray cluster, through the Python job API."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.errors import JobFailedError, JobStoppedError
from rayzero.orchestrator.job.api import Job
from rayzero.orchestrator.job_events import StateEntered, WorkersReady
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.spec import Workers
from rayzero.workers.messages import LogLine
from tests.integration.conftest import CPUS, Head
from tests.orchestrator.support import EventLog

pytestmark = pytest.mark.slow
JOBS = "tests.integration.jobs.plain"


@pytest.fixture(scope="module")
def connected(head: Head) -> Iterator[None]:
    """This process as a driver of the head: jobs started from here stay in this connection."""
    ray.init(address=head.address, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def notebook(connected: None) -> Iterator[EventLog]:
    """Watches a test's jobs, and sees to it that nothing of them is left behind."""
    notes = EventLog()
    yield notes
    pids = [worker.pid for up in notes.of(WorkersReady) for worker in up.workers]
    until = time.monotonic() + 60
    while (left(pids) or ray.available_resources().get("CPU") != CPUS) and time.monotonic() < until:
        time.sleep(0.1)
    assert left(pids) == []
    assert ray.available_resources()["CPU"] == CPUS


def left(pids: list[int]) -> list[str]:
    """What still lives; a process that only waits for its parent to take note does not."""
    found = []
    for pid in pids:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{pid} {process.status()} {process.cmdline()}")
    return found


def job(function: Any, folder: Path, **changes: Any) -> Job:
    settings: dict[str, Any] = {
        "workers": Workers(min=2),
        "steps": 20,
        "checkpoint": {"path": str(folder)},
    }
    entrypoint = f"{JOBS}:{function}" if isinstance(function, str) else function
    return Job("job", entrypoint, **(settings | changes))


def test_a_function_of_the_script_itself(
    notebook: EventLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """As many workers as fit, and what they print reaches the caller of `run`."""

    def train(ctx: Any) -> dict[str, Any]:
        print(f"hello from {ctx.rank} of {ctx.world_size}")
        for step in range(1, ctx.steps + 1):
            ctx.report(step=step, loss=1 / step, tokens=10)
        return {"folder": os.getcwd(), "threads": os.environ["OMP_NUM_THREADS"]}

    result = job(train, tmp_path, workers=Workers(min=1, max=8, cpus=2)).run()
    assert result.metrics["folder"] == os.getcwd()
    assert result.metrics["threads"] == "2"
    assert result.metrics["loss"] == {"first": 1.0, "last": 0.05}
    assert (result.steps, result.metrics["world_size"]) == (20, CPUS // 2)
    lines = capsys.readouterr().out.splitlines()
    assert "[rank 0] hello from 0 of 2" in lines
    assert any(line.startswith("step 20/20 | loss 0.0500 | ") for line in lines)
    assert lines[-1] == f"summary: {tmp_path}/job/summary.json"


def test_a_function_named_by_string_and_all_events_of_a_job(notebook: EventLog, tmp_path: Path):
    handle = job("train", tmp_path).submit(observer=notebook)
    assert not handle.wait(0.01)
    assert handle.wait(200)
    result = handle.result()
    assert json.loads(result.summary_path.read_text()) == result.metrics
    assert result.metrics["answer"] == {"first": 1.5, "last": 2.5}
    assert result.metrics["peak_bytes"]["process"] > 50e6
    assert [notice.state for notice in notebook.of(StateEntered)] == [
        State.STARTING,
        State.RUNNING,
        State.SUCCEEDED,
    ]
    records = notebook.of(StepRecord)
    assert [record.step for record in records] == list(range(1, 21))
    assert {(record.world_size, record.tokens) for record in records} == {(2, 200)}
    lines = {(line.rank, line.stream, line.text) for line in notebook.of(LogLine)}
    assert {(0, "stdout", "hello from 0 of 2"), (1, "stdout", "hello from 1 of 2")} <= lines
    assert (1, "stderr", "to stderr") in lines


def test_the_engine_finds_the_job_and_reports_its_steps(notebook: EventLog, tmp_path: Path):
    engine = {
        "train_batch_size": 6,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 2},
    }
    result = Job(
        "job",
        "tests.integration.jobs.linear:train",
        engine=engine,
        workers=Workers(min=2),
        steps=5,
        checkpoint={"path": str(tmp_path)},
    ).run(observer=notebook)
    records = notebook.of(StepRecord)
    assert [record.step for record in records] == [1, 2, 3, 4, 5]
    assert {record.tokens for record in records} == {6}  # 3 micro-steps on each of 2 ranks
    assert all(record.gauges["lr"] == 0.01 for record in records)
    summary = result.metrics
    assert (summary["stage"], summary["world_size"], summary["samples"]) == (2, 2, 30)
    assert summary["loss"]["last"] < summary["loss"]["first"]
    assert {"model_weights", "main_grads", "process"} <= set(summary["peak_bytes"])


def test_a_job_can_be_stopped(notebook: EventLog, tmp_path: Path):
    handle = job("endless", tmp_path).submit(observer=notebook)
    until = time.monotonic() + 200
    while not notebook.of(StepRecord) and time.monotonic() < until:
        time.sleep(0.05)
    handle.stop()
    assert handle.wait(60)
    with pytest.raises(JobStoppedError):
        handle.result()
    assert any(line.text == "unwound" for line in notebook.of(LogLine)), "and not killed"


def test_a_killed_worker_is_named_within_seconds(notebook: EventLog, tmp_path: Path):
    with pytest.raises(JobFailedError) as caught:
        job("killed", tmp_path, args={"at": 5}, recovery={"max_faults": 0}).run(observer=notebook)
    (up,) = notebook.of(WorkersReady)
    text = str(caught.value).splitlines()[0]
    victim = next(w for w in up.workers if f"(pid {w.pid})" in text)
    assert text.startswith(f"rank 1 on node {victim.node} (pid {victim.pid}) was lost in step")
    assert "exit" in text
    waited_s = time.time() - float((tmp_path / "job" / "killed").read_text())
    assert waited_s < 30, "less than collectives and heartbeats wait"


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        ("wrong_config", ConfigError, "the batch sizes disagree"),
        ("no_data", JobFailedError, "'/no/such' does not exist"),
    ],
)
def test_mistakes_that_only_a_worker_can_detect(
    notebook: EventLog, tmp_path: Path, function: str, kind: type[Exception], words: str
):
    with pytest.raises(kind) as caught:
        job(function, tmp_path, workers=Workers(min=1), args={"data": "/no/such"}).run(
            observer=notebook
        )
    assert words in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_module_that_fails_inside_is_shown_with_its_frames(notebook: EventLog, tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        Job("job", "tests.workers.broken:train", checkpoint={"path": str(tmp_path)}).run(
            observer=notebook
        )
    assert "cannot be imported: ZeroDivisionError" in str(caught.value)
    assert "VALUE = helper()" in str(caught.value)


def test_too_few_resources_after_the_stated_wait(notebook: EventLog, tmp_path: Path):
    workers = Workers(min=CPUS + 1, start_timeout_s=1.5)
    with pytest.raises(JobFailedError, match=r"room for 4 of at least 5 workers .* after 1\.5 s"):
        job("train", tmp_path, workers=workers).run(observer=notebook)
