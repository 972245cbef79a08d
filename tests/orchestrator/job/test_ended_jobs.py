"""How a job ended, as its cluster keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayzero.engine.errors import ConfigError, DataError, RayzeroError
from rayzero.orchestrator.errors import JobConfigError, JobFailedError, JobStoppedError
from rayzero.orchestrator.job import ended_jobs
from rayzero.orchestrator.job.ended_jobs import (
    MAX_RECORD_BYTES,
    MAX_RECORDS,
    decode_record,
    encode_record,
)
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.results import EndedJob, JobResult, JobStatus


def record(outcome: JobResult | RayzeroError, name: str = "job", at_s: float = 10.0) -> EndedJob:
    return EndedJob(
        JobStatus(name, State.SUCCEEDED, step=7, at_s=at_s, faults={"lost": 1}), outcome
    )


def read(kept: EndedJob) -> EndedJob:
    found = decode_record(encode_record(kept))
    assert found is not None
    return found


@pytest.mark.parametrize(
    "error",
    [
        JobFailedError("seen", "allowed", "fix", "Traceback: line 1"),
        JobConfigError("seen", "allowed", "fix", "Traceback"),
        JobStoppedError("was stopped"),
        ConfigError("seen", "allowed", "fix"),
    ],
)
def test_an_error_is_the_same_to_whoever_asks_later(error: RayzeroError):
    found = read(record(error))
    assert (type(found.outcome), str(found.outcome)) == (type(error), str(error))


def test_an_error_of_another_kind_is_a_failed_job():
    found = read(record(DataError("a hole")))
    with pytest.raises(JobFailedError, match="a hole"):
        found.result()


def test_a_result_and_how_the_job_stood():
    kept = record(JobResult("job", {"steps": 7, "loss": {"last": 0.5}}, Path("/x/s.json")))
    assert read(kept) == kept


def test_what_is_too_much_is_left_out_and_the_rest_kept():
    result = JobResult("job", {"steps": 7, "all": "x" * MAX_RECORD_BYTES}, Path("/x"))
    content = encode_record(record(result))
    assert len(content) < MAX_RECORD_BYTES
    found = decode_record(content)
    assert found is not None
    assert found.result().steps == 7


def test_no_secret_is_kept():
    result = JobResult("job", {"steps": 1, "hf_token": "abc", "at": "s3://me:pass@b/"}, Path("/x"))
    content = encode_record(record(result))
    assert b"abc" not in content
    assert b"pass@" not in content


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"status": {"state": "odd"}}', b"\xff"])
def test_what_another_version_wrote_is_passed_over(content: bytes):
    assert decode_record(content) is None


def test_their_number_and_age_are_bounded(monkeypatch: pytest.MonkeyPatch):
    kept: dict[bytes, bytes] = {}
    monkeypatch.setattr(ended_jobs, "_internal_kv_put", lambda k, v, *_, **__: kept.update({k: v}))
    monkeypatch.setattr(ended_jobs, "_internal_kv_get", lambda k, **_: kept.get(k))
    monkeypatch.setattr(ended_jobs, "_internal_kv_list", lambda *_, **__: list(kept))
    monkeypatch.setattr(ended_jobs, "_internal_kv_del", lambda k, **_: kept.pop(k, None))
    monkeypatch.setattr("time.time", lambda: 10_000_000.0)
    ended_jobs.store_ended(record(JobStoppedError("s"), "old", at_s=1.0))
    assert kept == {}
    for number in range(MAX_RECORDS + 3):
        ended_jobs.store_ended(
            record(JobStoppedError("s"), f"job-{number}", at_s=9_999_000.0 + number)
        )
    names = {one.status.name for one in ended_jobs.list_ended()}
    assert names == {f"job-{number}" for number in range(3, MAX_RECORDS + 3)}
