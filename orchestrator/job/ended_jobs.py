"""Records of how jobs ended, in the cluster's key-value store (Ray's internal KV).

Ray has no public storage that outlives its processes; its own libraries use this one. The records
end with the cluster; the journal stays.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
)

from rayzero.engine.errors import ConfigError, RayzeroError
from rayzero.engine.redact import redact_document
from rayzero.orchestrator.errors import JobConfigError, JobFailedError, JobStoppedError
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.results import JobEnd, JobResult, JobStatus

MAX_RECORDS = 100
"""Records per cluster, one per job name; the oldest are deleted."""


MAX_RECORD_AGE_S = 30 * 86400.0
"""Older records are deleted."""


MAX_RECORD_BYTES = 64 * 1024
"""Large results of the training function are left out of bigger records."""

_MAX_METRIC_CHARS = 512


_KV_NAMESPACE = b"rayzero"


_KEY_PREFIX = b"ended:"


_ERROR_CLASSES: Mapping[str, type[RayzeroError]] = {
    cls.__name__: cls for cls in (ConfigError, JobConfigError, JobFailedError, JobStoppedError)
}


@dataclass(frozen=True)
class EndedJobRecord:
    """The end of one job, at `status.at_s`."""

    status: JobStatus
    ended: JobEnd


def store_ended(record: EndedJobRecord) -> None:
    """Stores a record, replacing an earlier one of that name. Blocks on the head node."""
    _internal_kv_put(
        _kv_key(record.status.name), encode_record(record), True, namespace=_KV_NAMESPACE
    )
    records = sorted(list_ended(), key=lambda ended: ended.status.at_s, reverse=True)
    oldest_s = time.time() - MAX_RECORD_AGE_S
    for index, old in enumerate(records):
        if index >= MAX_RECORDS or old.status.at_s < oldest_s:
            delete_ended(old.status.name)


def delete_ended(name: str) -> None:
    """Deletes the record of a job name, when a job of that name starts."""
    _internal_kv_del(_kv_key(name), namespace=_KV_NAMESPACE)


def load_ended(name: str) -> EndedJobRecord | None:
    """The record of a job name, if the cluster has one and answers."""
    try:
        return _read_record(_kv_key(name)) if ray.is_initialized() else None
    except RayError:
        return None


def list_ended() -> list[EndedJobRecord]:
    """All records, sorted by name."""
    keys = sorted(_internal_kv_list(_KEY_PREFIX, namespace=_KV_NAMESPACE))
    return [record for key in keys if (record := _read_record(key)) is not None]


def encode_record(record: EndedJobRecord) -> bytes:
    """JSON, with secrets redacted."""
    ended, result, error = record.ended, record.ended.result, record.ended.error
    document: dict[str, Any] = {"status": asdict(record.status)}
    if result is not None:
        document["result"] = {**asdict(result), "summary_path": str(result.summary_path)}
    if error is not None:
        kind = next((name for name, cls in _ERROR_CLASSES.items() if type(error) is cls), "")
        fallback = "ConfigError" if isinstance(error, ConfigError) else "JobFailedError"
        traceback = getattr(error, "traceback", "")
        document["error"] = {
            "kind": kind or fallback,
            "given": [error.seen, error.allowed, error.fix, traceback[-MAX_RECORD_BYTES // 4 :]],
        }
    content = json.dumps(redact_document(document), default=str).encode()
    if len(content) > MAX_RECORD_BYTES and result is not None:
        small = {
            key: value
            for key, value in result.metrics.items()
            if len(repr(value)) < _MAX_METRIC_CHARS
        }
        slim = JobResult(result.name, small, result.summary_path)
        return encode_record(EndedJobRecord(record.status, JobEnd(slim, ended.error)))
    return content


def decode_record(content: bytes) -> EndedJobRecord | None:
    """None if another version wrote the record."""
    try:
        document = json.loads(content)
        status = document["status"]
        state = None if status["state"] is None else State(status["state"])
        ended = JobEnd(error=_decode_error(document["error"])) if "error" in document else JobEnd()
        if "result" in document:
            result = document["result"]
            path = Path(result["summary_path"])
            ended = JobEnd(JobResult(result["name"], result["metrics"], path))
        return EndedJobRecord(JobStatus(**{**status, "state": state}), ended)
    except (ValueError, KeyError, TypeError):
        return None


def _decode_error(document: Mapping[str, Any]) -> RayzeroError:
    kind, arguments = _ERROR_CLASSES[document["kind"]], document["given"]
    has_traceback = kind in (JobFailedError, JobConfigError)
    return kind(*arguments) if has_traceback else kind(*arguments[:3])


def _read_record(key: bytes) -> EndedJobRecord | None:
    content = _internal_kv_get(key, namespace=_KV_NAMESPACE)
    return None if content is None else decode_record(content)


def _kv_key(name: str) -> bytes:
    return _KEY_PREFIX + name.encode()
