"""Journal and lease in S3, served by a local server process."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from typer.testing import CliRunner

from rayzero.engine.checkpoint.store import join_url, open_store
from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.background_writer import BackgroundWriter
from rayzero.orchestrator.cli.app import app
from rayzero.orchestrator.facts import EventBus, JobFacts
from rayzero.orchestrator.job.claims import Claim, ClaimStore, new_claim, this_process
from rayzero.orchestrator.job.lease import acquire_lease
from rayzero.orchestrator.job.recorder import EventBuffer, JobRecorder
from rayzero.orchestrator.job_events import Checkpointed, Repaired, StateEntered
from rayzero.orchestrator.journal.entries import JournalUpdate, JournalWriter
from rayzero.orchestrator.journal.files import (
    MAX_SEGMENT_BYTES,
    SEGMENTS_FOLDER,
    JournalFiles,
    read_journal,
)
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.metrics.jobs_page import JobsPage
from rayzero.orchestrator.metrics.telemetry import RunFiles, Telemetry
from rayzero.orchestrator.plan import JobPlan, make_plan
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.results import JobResult
from rayzero.orchestrator.spec import JobSpec
from rayzero.workers.messages import LogLine
from tests.orchestrator.support import VirtualClock, begun
from tests.support.bucket import bucket_url
from tests.support.flaky_server import flaky_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with bucket_url() as url:
        yield url


@pytest.fixture
def job_plan(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> JobPlan:
    monkeypatch.chdir(tmp_path)
    path = join_url(bucket, request.node.name)
    spec = JobSpec(name="job", entrypoint="m:f", checkpoint={"path": path})  # type: ignore[arg-type]
    return make_plan(spec, "m:f")


def read_history(archive: str) -> JobFacts:
    history = read_journal(archive)
    assert history is not None
    return history


def test_journal_contains_every_transition(job_plan: JobPlan):
    """Written by the background thread, as in a job's process."""
    writer = BackgroundWriter(lambda text: pytest.fail(text))
    events = EventBus()
    recorder = JobRecorder(job_plan, EventBuffer(), writer, events)
    states = ["starting", "running", "recovering", "running", "succeeded"]
    recorder.begin(adopted=False)
    for number, state in enumerate(states):
        events.emit(StateEntered(State(state), number, 2, 10 * number, "e"))
    events.emit(Repaired("lost", ("rank 1",), 20, 3, 2, 2, {"load": 1.0}))
    events.emit(Checkpointed(40, "f", 1, 0.1, 0.0))
    recorder.end(JobResult("job", {"steps": 6}, Path()))
    assert writer.close(60)
    store = open_store(join_url(job_plan.job_folder, SEGMENTS_FOLDER))
    (file,) = store.list_folder()
    records = [json.loads(line) for line in store.read(file.name).decode().splitlines()]
    assert [record["state"] for record in records if record["kind"] == "moved"] == states
    history = read_history(job_plan.job_folder)
    assert (history.end_state, history.generation) == ("succeeded", 4)
    assert (history.step, history.total_repairs) == (40, 1)
    assert history.checkpoint_step == 40


def test_each_process_writes_separate_segments(job_plan: JobPlan):
    archive = job_plan.job_folder
    updates: list[JournalUpdate] = []
    events = EventBus()
    JournalWriter(updates.append, events)
    events.emit(begun(job_plan))
    moved = StateEntered(State.RUNNING, 3, 2, 70)
    files = JournalFiles(archive)
    for _ in range(2):
        for _ in range(MAX_SEGMENT_BYTES // 50):
            events.emit(moved)
        files.write(updates)
        updates.clear()
    events.emit(StepRecord(75, 2, 3, None, 0.0, 0.5, {}))
    JournalFiles(archive).write(updates)  # by the process that adopted the job
    assert read_history(archive).step == 75
    events.emit(moved)
    JournalFiles(archive).write(updates)
    names = sorted(file.name for file in open_store(join_url(archive, "journal")).list_folder())
    assert [name[:6] for name in names] == [f"{n:06d}" for n in range(1, len(names) + 1)]
    assert len(names) == 3


def test_commands_and_page_read_a_job_whose_cluster_is_gone(
    job_plan: JobPlan, bucket: str, monkeypatch: pytest.MonkeyPatch
):
    """Written as in the processes of two controllers, the first of which is killed, each with a
    disk of its own."""
    path = job_plan.spec.checkpoint.path
    texts, printed = [], []
    for process in (1, 2):
        log, clock, lost = job_plan.log_path, VirtualClock(), read_journal(job_plan.job_folder)
        writer = BackgroundWriter(lambda text: pytest.fail(text))
        events = EventBus(lost)
        telemetry = Telemetry(job_plan, clock, writer, events)
        if lost is not None:
            telemetry.restore_curves(job_plan.job_folder, pytest.fail)
        recorder = JobRecorder(job_plan, EventBuffer(), writer, events, warn=pytest.fail)
        RunFiles(job_plan, telemetry, writer, recorder.store_writer).subscribe_to(events)
        recorder.begin(adopted=process == 2)
        events.emit(StateEntered(State.RUNNING, process, 2, 5 * process))
        for step in range(5 * process, 5 * process + 5):
            events.emit(StepRecord(step, 2, process, 1 / step, 0.0, 0.5, {}))
            line = f"step {step} by {process}"
            events.emit(LogLine(step % 2, "stdout", line))
            printed.append(f"[rank {step % 2}] {line}")
        if process == 2:
            events.emit(StateEntered(State.SUCCEEDED, process, 2, 14))
            recorder.end(JobResult("job", {"steps": 14}, job_plan.summary_path))
        assert writer.close(60)
        recorder.close_store(60)
        texts.append(log.read_text())
        files = [json.loads((log.parents[1] / name).read_bytes()) for name in FILES]
        shutil.rmtree(job_plan.output_dir)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")  # of the cluster that is gone

    def rayzero(*words: str) -> str:
        done = CliRunner().invoke(app, [*words, "--path", path])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert rayzero("logs", "job") == "".join(texts)
    assert rayzero("logs", "job", "--follow") == "".join(texts)
    of_rank = [line for line in printed if line.startswith("[rank 1]")]
    assert rayzero("logs", "job", "--rank", "1").splitlines() == of_rank
    assert rayzero("status", "job").startswith("job: succeeded at step 14")
    (listed,) = json.loads(rayzero("ls", "--json"))
    assert (listed["state"], listed["step"]) == ("succeeded", 14)
    stored = open_store(job_plan.job_folder)
    assert json.loads(stored.read("summary.json")) == {"steps": 14}
    with closing(JobsPage(path, "127.0.0.1", 0)) as page:
        (row,) = json.loads(fetch(f"{page.url}jobs.json"))["jobs"]
        assert (row["state"], row["step"], row["has_curves"]) == ("succeeded", 14, True)
        served = [json.loads(fetch(f"{page.url}jobs/job/{name}")) for name in FILES]
    for of_store, of_disk in zip(served, files, strict=True):  # written within a second
        assert of_store.pop("at_s") == pytest.approx(of_disk.pop("at_s"), abs=60)
        assert of_store.pop("goodput", {}).keys() == of_disk.pop("goodput", {}).keys()
        assert of_store == of_disk
    assert [step for step, _ in served[1]["curves"]["loss"]] == list(range(5, 15))


FILES = ("snapshot.json", "history.json")


def fetch(url: str) -> bytes:
    with urlopen(url, timeout=20) as response:
        return bytes(response.read())


@pytest.mark.parametrize("words", [["logs", "job"], ["status", "job"], ["page"]])
def test_store_without_permission_is_named(words: list[str], bucket: str):
    port = int(bucket.partition("127.0.0.1:")[2].partition("&")[0])
    with flaky_server(port) as server:
        server.kind, server.left = "403", 100
        url = join_url(bucket.replace(f":{port}&", f":{server.server_port}&"), "private")
        done = CliRunner().invoke(app, [*words, "--path", url])
        assert server.fired["403"]
    assert done.exit_code == 1, done.output
    assert "permissions of the folder, the store's credentials" in done.stderr
    assert "s3://bucket/private" in done.stderr


def test_lease_is_exclusive(job_plan: JobPlan):
    archive = job_plan.job_folder
    lease = acquire_lease(archive, new_claim("job", 60.0), print)
    with pytest.raises(ConfigError, match="is in use") as error:
        acquire_lease(archive, new_claim("job", 60.0), print)
    assert f"the process {os.getpid()} on {socket.gethostname()}" in str(error.value)
    lease.check()
    lease.release()
    assert open_store(join_url(archive, "lease")).list_folder() == []
    other_process = replace(this_process(), host="other", boot="another boot")
    ClaimStore(archive).write(Claim("0" * 16, "job", other_process, 1.0, holds=True, epoch=7))
    lease = acquire_lease(
        archive, new_claim("job", 60.0), print
    )  # waits until that claim has expired
    lease.check()
    lease.release()
