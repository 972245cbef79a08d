"""Records of how jobs ended, in the cluster's key-value store (Ray's internal KV).

Ray has no public storage that outlives its processes; its own libraries use the internal KV, too.
The records end with the cluster; the journal stays.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import ray
from pydantic import TypeAdapter
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
from rayzero.orchestrator.results import EndedJob, JobResult, JobStatus

MAX_RECORDS = 100  # records per cluster, one per job name; the oldest are deleted
MAX_RECORD_AGE_S = 30 * 86400.0  # older records are deleted
MAX_RECORD_BYTES = 64 * 1024
"""In a larger record, large values that the training function returned are left out."""
_MAX_METRIC_CHARS = 512
_KV_NAMESPACE = b"rayzero"
_KEY_PREFIX = b"ended:"

_ERROR_CLASSES: Mapping[str, type[RayzeroError]] = {
    cls.__name__: cls for cls in (ConfigError, JobConfigError, JobFailedError, JobStoppedError)
}
_STATUS, _RESULT = TypeAdapter(JobStatus), TypeAdapter(JobResult)


def store_ended(job: EndedJob) -> None:
    """Stores a record, replacing an earlier one of that name. Waits for the head node's answer."""
    _internal_kv_put(_kv_key(job.status.name), encode_record(job), True, namespace=_KV_NAMESPACE)
    records = sorted(list_ended(), key=lambda ended: ended.status.at_s, reverse=True)
    oldest_s = time.time() - MAX_RECORD_AGE_S
    for index, old in enumerate(records):
        if index >= MAX_RECORDS or old.status.at_s < oldest_s:
            delete_ended(old.status.name)


def delete_ended(name: str) -> None:
    """Deletes the record of a job name, when a job of that name starts."""
    _internal_kv_del(_kv_key(name), namespace=_KV_NAMESPACE)


def load_ended(name: str) -> EndedJob | None:
    """Returns the record of a job name; None if there is none, or the cluster does not answer."""
    try:
        return _read_record(_kv_key(name)) if ray.is_initialized() else None
    except RayError:
        return None


def list_ended() -> list[EndedJob]:
    """Returns all records, sorted by name."""
    keys = sorted(_internal_kv_list(_KEY_PREFIX, namespace=_KV_NAMESPACE))
    return [record for key in keys if (record := _read_record(key)) is not None]


def encode_record(job: EndedJob) -> bytes:
    """Returns a record as JSON, with secrets redacted."""
    document: dict[str, Any] = {"status": asdict(job.status)}
    outcome = job.outcome
    if isinstance(outcome, RayzeroError):
        kind = type(outcome).__name__
        if kind not in _ERROR_CLASSES:
            kind = "ConfigError" if isinstance(outcome, ConfigError) else "JobFailedError"
        traceback = getattr(outcome, "traceback", "")[-MAX_RECORD_BYTES // 4 :]
        given = [outcome.seen, outcome.allowed, outcome.fix, traceback]
        document["error"] = {"kind": kind, "given": given}
    else:
        document["result"] = asdict(outcome)
    content = json.dumps(redact_document(document), default=str).encode()
    if len(content) > MAX_RECORD_BYTES and isinstance(outcome, JobResult):
        metrics = outcome.metrics.items()
        small = {key: value for key, value in metrics if len(repr(value)) < _MAX_METRIC_CHARS}
        if len(small) < len(metrics):
            return encode_record(replace(job, outcome=replace(outcome, metrics=small)))
    return content


def decode_record(content: bytes) -> EndedJob | None:
    """Reads a record; None if a version with another format wrote it."""
    try:
        document = json.loads(content)
        status = _STATUS.validate_python(document["status"])
        if "error" in document:
            return EndedJob(status, _decode_error(document["error"]))
        return EndedJob(status, _RESULT.validate_python(document["result"]))
    except (ValueError, KeyError, TypeError):
        return None


def _decode_error(document: Mapping[str, Any]) -> RayzeroError:
    kind, arguments = _ERROR_CLASSES[document["kind"]], document["given"]
    has_traceback = kind in (JobFailedError, JobConfigError)
    return kind(*arguments) if has_traceback else kind(*arguments[:3])


def _read_record(key: bytes) -> EndedJob | None:
    content = _internal_kv_get(key, namespace=_KV_NAMESPACE)
    return None if content is None else decode_record(content)


def _kv_key(name: str) -> bytes:
    return _KEY_PREFIX + name.encode()
