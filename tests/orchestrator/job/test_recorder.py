"""A job's events for its clients, which learn how many were dropped; records of ended jobs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rayzero.engine.errors import ConfigError, DataError, RayzeroError
from rayzero.orchestrator.errors import JobConfigError, JobFailedError, JobStoppedError
from rayzero.orchestrator.job import ended_jobs
from rayzero.orchestrator.job import recorder as recorder_module
from rayzero.orchestrator.job.ended_jobs import (
    MAX_RECORD_BYTES,
    MAX_RECORDS,
    decode_record,
    encode_record,
)
from rayzero.orchestrator.job.recorder import LATEST, EventBuffer
from rayzero.orchestrator.job_events import JobWarning, StateEntered
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.results import EndedJob, JobResult, JobStatus
from rayzero.workers import bounded_queue
from rayzero.workers.messages import LogLine


async def test_event_pages_are_ordered_and_end():
    buffer = EventBuffer(max_page_events=3)
    for number in range(7):
        buffer.on_event(JobWarning(str(number)))
    buffer.finish(EndedJob(JobStatus("job", State.STOPPED), JobStoppedError("s")))
    texts, since, pages = [], 0, 0
    while True:
        page = await buffer.fetch_since(buffer.run, since, 1.0)
        texts += [event.text for event in page.events if isinstance(event, JobWarning)]
        since, pages = page.next_index, pages + 1
        if page.ended is not None:
            break
    assert (texts, pages) == ([str(number) for number in range(7)], 3)


async def test_slow_client_receives_number_of_dropped_events():
    buffer = EventBuffer(max_events=4)
    for number in range(10):
        buffer.on_event(JobWarning(str(number)))
    page = await buffer.fetch_since("", 1, 1.0)
    assert (page.dropped, [event.text for event in page.events]) == (5, ["6", "7", "8", "9"])
    assert (await buffer.fetch_since("another process", 99, 1.0)).dropped == 6


async def test_late_client_receives_latest_state_and_later_events():
    buffer = EventBuffer()
    for state in (State.STARTING, State.RUNNING):
        buffer.on_event(StateEntered(state, 1, 2))
    buffer.on_event(JobWarning("old"))
    page = await buffer.fetch_since("", LATEST, 1.0)
    assert page.events == (StateEntered(State.RUNNING, 1, 2),)
    waiting = asyncio.ensure_future(buffer.fetch_since(page.run, page.next_index, 5.0))
    await asyncio.sleep(0)
    buffer.on_event(JobWarning("new"))
    assert (await waiting).events == (JobWarning("new"),)
    assert (await buffer.fetch_since(page.run, page.next_index + 1, 0.01)).events == ()


async def test_events_and_pages_are_bounded_by_bytes():
    buffer = EventBuffer()
    for number in range(10_000):
        buffer.on_event(LogLine(0, "stdout", f"{number:010000}"))
    since, kept = 0, 0
    while since < 10_000:
        page = await buffer.fetch_since(buffer.run, since, 1.0)
        assert 0 < 10_000 * len(page.events) <= recorder_module.MAX_PAGE_BYTES
        assert page.next_index == since + page.dropped + len(page.events)
        since, kept = page.next_index, kept + len(page.events)
    assert 10_000 * kept <= bounded_queue.MAX_BYTES


def record(outcome: JobResult | RayzeroError, name: str = "job", at_s: float = 10.0) -> EndedJob:
    return EndedJob(
        JobStatus(name, State.SUCCEEDED, step=7, at_s=at_s, faults={"lost": 1}), outcome
    )


def read(stored: EndedJob) -> EndedJob:
    decoded = decode_record(encode_record(stored))
    assert decoded is not None
    return decoded


@pytest.mark.parametrize(
    "error",
    [
        JobFailedError("seen", "allowed", "fix", "Traceback: line 1"),
        JobConfigError("seen", "allowed", "fix", "Traceback"),
        JobStoppedError("was stopped"),
        ConfigError("seen", "allowed", "fix"),
    ],
)
def test_error_is_restored(error: RayzeroError):
    decoded = read(record(error))
    assert (type(decoded.outcome), str(decoded.outcome)) == (type(error), str(error))


def test_error_of_another_class_becomes_failed_job():
    decoded = read(record(DataError("a sample is missing")))
    with pytest.raises(JobFailedError, match="a sample is missing"):
        decoded.result()


def test_result_and_status_are_restored():
    stored = record(JobResult("job", {"steps": 7, "loss": {"last": 0.5}}, Path("/x/s.json")))
    assert read(stored) == stored


def test_large_metrics_are_omitted():
    result = JobResult("job", {"steps": 7, "all": "x" * MAX_RECORD_BYTES}, Path("/x"))
    content = encode_record(record(result))
    assert len(content) < MAX_RECORD_BYTES
    decoded = decode_record(content)
    assert decoded is not None
    assert decoded.result().steps == 7


def test_secrets_are_redacted():
    result = JobResult("job", {"steps": 1, "hf_token": "abc", "at": "s3://me:pass@b/"}, Path("/x"))
    content = encode_record(record(result))
    assert b"abc" not in content
    assert b"pass@" not in content


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"status": {"state": "odd"}}', b"\xff"])
def test_record_of_another_version_is_ignored(content: bytes):
    assert decode_record(content) is None


def test_number_and_age_of_records_are_bounded(monkeypatch: pytest.MonkeyPatch):
    stored: dict[bytes, bytes] = {}
    monkeypatch.setattr(
        ended_jobs, "_internal_kv_put", lambda k, v, *_, **__: stored.update({k: v})
    )
    monkeypatch.setattr(ended_jobs, "_internal_kv_get", lambda k, **_: stored.get(k))
    monkeypatch.setattr(ended_jobs, "_internal_kv_list", lambda *_, **__: list(stored))
    monkeypatch.setattr(ended_jobs, "_internal_kv_del", lambda k, **_: stored.pop(k, None))
    monkeypatch.setattr("time.time", lambda: 10_000_000.0)
    ended_jobs.store_ended(record(JobStoppedError("s"), "old", at_s=1.0))
    assert stored == {}
    for number in range(MAX_RECORDS + 3):
        ended_jobs.store_ended(
            record(JobStoppedError("s"), f"job-{number}", at_s=9_999_000.0 + number)
        )
    names = {job.status.name for job in ended_jobs.list_ended()}
    assert names == {f"job-{number}" for number in range(3, MAX_RECORDS + 3)}
