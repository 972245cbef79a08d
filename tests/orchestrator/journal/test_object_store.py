"""A journal and a lease through S3: a server in a process of its own, which has to be there."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayzero.engine.checkpoint.open_store import open_store
from rayzero.engine.checkpoint.store import join_url
from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.job.lease import Claim, this_process
from rayzero.orchestrator.job.lease_holder import ClaimStore, acquire_lease
from rayzero.orchestrator.job.recorder import EventBuffer, JobRecorder
from rayzero.orchestrator.job_events import Checkpointed, EventBus, Repaired, StateEntered
from rayzero.orchestrator.job_file import to_document
from rayzero.orchestrator.journal.run_history import RunHistory
from rayzero.orchestrator.journal.writer import (
    MAX_SEGMENT_BYTES,
    JournalSegments,
    journal_folder,
    read_journal,
)
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.plan import JobPlan, make_plan
from rayzero.orchestrator.spec import JobSpec
from tests.support.bucket import bucket_url

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with bucket_url() as url:
        yield url


@pytest.fixture
def planned(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> JobPlan:
    monkeypatch.chdir(tmp_path)
    path = join_url(bucket, request.node.name)
    spec = JobSpec(name="job", entrypoint="m:f", checkpoint={"path": path})  # type: ignore[arg-type]
    return make_plan(spec, "m:f")


def known(archive: str) -> RunHistory:
    past = read_journal(archive)
    assert past is not None
    return past


def line(kind: str, **fields: Any) -> str:
    return json.dumps({"at_s": time.time(), "kind": kind, **fields})


def begun(planned: JobPlan, *, adopted: bool = False) -> str:
    spec = to_document(planned.spec)
    return line("begun", run="1", adopted=adopted, spec=spec, working_dir="/w", by_value=False)


def test_every_transition_is_there_at_the_end(planned: JobPlan):
    """Written as a job's process does: behind it, by its own thread."""
    papers = JobRecorder(planned, EventBuffer(), lambda text: pytest.fail(text))
    spec = to_document(planned.spec)
    papers.append_journal(
        "begun", run="1", adopted=False, spec=spec, working_dir="/w", by_value=False
    )
    states = ["starting", "running", "recovering", "running", "succeeded"]
    events = EventBus()
    papers.subscribe_to(events)
    for number, state in enumerate(states):
        events.emit(StateEntered(State(state), number, 2, 10 * number, "e"))
    events.emit(Repaired("lost", ("rank 1",), 20, 3, 2, 2, {"load": 1.0}))
    events.emit(Checkpointed(40, "f", 1, 0.1, 0.0))
    papers.append_journal("ended", state="succeeded", error="")
    assert papers.close(60)
    (file,) = open_store(journal_folder(planned.job_folder)).list_folder()
    content = open_store(journal_folder(planned.job_folder)).read(file.name).decode()
    told = [json.loads(one) for one in content.splitlines()]
    assert [one["state"] for one in told if one["kind"] == "moved"] == states
    past = known(planned.job_folder)
    assert (past.end_state, past.generation, past.step, past.total_repairs) == (
        "succeeded",
        4,
        40,
        1,
    )
    assert past.checkpoint_step == 40


def test_a_lost_run_is_gone_on_with_whatever_is_torn_or_missing(planned: JobPlan):
    archive = planned.job_folder
    first = JournalSegments(archive)
    first.write([begun(planned)])
    filler = [line("noted", text="x" * 200) for _ in range(MAX_SEGMENT_BYTES // 100)]
    first.write(filler)
    moved = {"state": "running", "generation": 3, "world_size": 2, "step": 70}
    first.write([line("moved", **moved), *filler[:1]])
    second = JournalSegments(archive)  # the process that adopted it
    second.write([begun(planned, adopted=True), line("step", step=75)])
    store = open_store(journal_folder(archive))
    names = sorted(one.name for one in store.list_folder())
    assert len(names) >= 3
    store.replace("000009-zz.tmp", b"\x00")  # nothing of ours
    store.replace(names[1], store.read(names[1])[:-150])  # torn
    past = known(archive)
    assert (past.generation, past.step, past.adoptions) == (3, 75, 1)
    store.remove(names[1])
    past = known(archive)
    assert (past.step, past.adoptions) == (75, 1)
    assert not past.end_state


def test_a_long_run_is_a_few_objects(planned: JobPlan):
    segments = JournalSegments(planned.job_folder)
    segments.write([begun(planned)])
    counted = {"seconds": {f"cause-{n}": 1.5 for n in range(15)}}
    for step in range(40):
        segments.write([line("step", step=step, counted=counted)])
    (file,) = open_store(journal_folder(planned.job_folder)).list_folder()
    assert file.nbytes < 4096
    assert known(planned.job_folder).step == 39


def test_one_cluster_at_a_time(planned: JobPlan):
    archive = planned.job_folder
    lease = acquire_lease(archive, "job", 60.0, print)
    with pytest.raises(ConfigError, match="is in use") as refused:
        acquire_lease(archive, "job", 60.0, print)
    assert f"the process {os.getpid()} on {socket.gethostname()}" in str(refused.value)
    lease.check()
    lease.release()
    assert open_store(join_url(archive, "lease")).list_folder() == []
    elsewhere = replace(this_process(), host="other", boot="another boot")
    ClaimStore(archive).write(Claim("0" * 16, "job", elsewhere, 1.0, holds=True, epoch=7))
    again = acquire_lease(archive, "job", 60.0, print)  # waits for that lease to be over
    again.check()
    again.release()
