"""Journal and lease in S3, served by a local server process."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayzero.engine.checkpoint.store import join_url, open_store
from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.background_writer import BackgroundWriter
from rayzero.orchestrator.facts import EventBus, JobFacts
from rayzero.orchestrator.job.claims import Claim, ClaimStore, this_process
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
from rayzero.orchestrator.plan import JobPlan, make_plan
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.results import JobResult
from rayzero.orchestrator.spec import JobSpec
from tests.orchestrator.support import begun
from tests.support.bucket import bucket_url

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
    for _ in range(MAX_SEGMENT_BYTES // 50):
        events.emit(moved)
    JournalFiles(archive).write(updates)
    updates.clear()
    events.emit(StepRecord(75, 2, 3, None, 0.0, 0.5, {}))
    JournalFiles(archive).write(updates)  # by the process that adopted the job
    assert read_history(archive).step == 75
    events.emit(moved)
    JournalFiles(archive).write(updates)
    names = sorted(file.name for file in open_store(join_url(archive, "journal")).list_folder())
    assert [name[:6] for name in names] == [f"{n:06d}" for n in range(1, len(names) + 1)]
    assert len(names) >= 3


def test_lease_is_exclusive(job_plan: JobPlan):
    archive = job_plan.job_folder
    lease = acquire_lease(archive, "job", 60.0, print)
    with pytest.raises(ConfigError, match="is in use") as error:
        acquire_lease(archive, "job", 60.0, print)
    assert f"the process {os.getpid()} on {socket.gethostname()}" in str(error.value)
    lease.check()
    lease.release()
    assert open_store(join_url(archive, "lease")).list_folder() == []
    other_process = replace(this_process(), host="other", boot="another boot")
    ClaimStore(archive).write(Claim("0" * 16, "job", other_process, 1.0, holds=True, epoch=7))
    lease = acquire_lease(archive, "job", 60.0, print)  # waits until that claim has expired
    lease.check()
    lease.release()
