"""Records of ended jobs in the cluster."""

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
