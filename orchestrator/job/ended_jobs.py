"""How jobs ended, kept by the cluster for a while: a small record each, in its key-value store.

Nothing public of Ray keeps a note that no process has to hold; this store is what its own libraries
use for that. It goes with the cluster; the journal stays.
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
"""Records in a cluster, one for a name; the oldest go."""


MAX_RECORD_AGE_S = 30 * 86400.0
"""How long."""


MAX_RECORD_BYTES = 64 * 1024
"""What a training function returned is left out where it is more than that."""

_MAX_METRIC_CHARS = 512


_KV_NAMESPACE = b"rayzero"


_KEY_PREFIX = b"ended:"


_ERROR_CLASSES: Mapping[str, type[RayzeroError]] = {
    one.__name__: one for one in (ConfigError, JobConfigError, JobFailedError, JobStoppedError)
}


@dataclass(frozen=True)
class EndedJobRecord:
    """How one job ended. `status.at_s` is when."""

    status: JobStatus
    ended: JobEnd


def store_ended(record: EndedJobRecord) -> None:
    """Keeps a record, in place of an earlier one of that name. Waits for the cluster's head."""
    _internal_kv_put(
        _kv_key(record.status.name), encode_record(record), True, namespace=_KV_NAMESPACE
    )
    found = sorted(list_ended(), key=lambda one: one.status.at_s, reverse=True)
    oldest_s = time.time() - MAX_RECORD_AGE_S
    for place, one in enumerate(found):
        if place >= MAX_RECORDS or one.status.at_s < oldest_s:
            delete_ended(one.status.name)


def delete_ended(name: str) -> None:
    """A job of that name begins."""
    _internal_kv_del(_kv_key(name), namespace=_KV_NAMESPACE)


def load_ended(name: str) -> EndedJobRecord | None:
    """How the last job of that name ended, if this cluster knows and can be asked."""
    try:
        return _read_record(_kv_key(name)) if ray.is_initialized() else None
    except RayError:
        return None


def list_ended() -> list[EndedJobRecord]:
    """All that this cluster knows, by name."""
    keys = sorted(_internal_kv_list(_KEY_PREFIX, namespace=_KV_NAMESPACE))
    return [found for key in keys if (found := _read_record(key)) is not None]


def encode_record(record: EndedJobRecord) -> bytes:
    """Without secrets."""
    ended, result, error = record.ended, record.ended.result, record.ended.error
    document: dict[str, Any] = {"status": asdict(record.status)}
    if result is not None:
        document["result"] = {**asdict(result), "summary_path": str(result.summary_path)}
    if error is not None:
        kind = next((name for name, one in _ERROR_CLASSES.items() if type(error) is one), "")
        fallback = "ConfigError" if isinstance(error, ConfigError) else "JobFailedError"
        traceback = getattr(error, "traceback", "")
        document["error"] = {
            "kind": kind or fallback,
            "given": [error.seen, error.allowed, error.fix, traceback[-MAX_RECORD_BYTES // 4 :]],
        }
    content = json.dumps(redact_document(document), default=str).encode()
    if len(content) > MAX_RECORD_BYTES and result is not None:
        small = {
            key: one for key, one in result.metrics.items() if len(repr(one)) < _MAX_METRIC_CHARS
        }
        slim = JobResult(result.name, small, result.summary_path)
        return encode_record(EndedJobRecord(record.status, JobEnd(slim, ended.error)))
    return content


def decode_record(content: bytes) -> EndedJobRecord | None:
    """None for what was written by another version."""
    try:
        found = json.loads(content)
        status = found["status"]
        state = None if status["state"] is None else State(status["state"])
        ended = JobEnd(error=_decode_error(found["error"])) if "error" in found else JobEnd()
        if "result" in found:
            result = found["result"]
            path = Path(result["summary_path"])
            ended = JobEnd(JobResult(result["name"], result["metrics"], path))
        return EndedJobRecord(JobStatus(**{**status, "state": state}), ended)
    except (ValueError, KeyError, TypeError):
        return None


def _decode_error(found: Mapping[str, Any]) -> RayzeroError:
    kind = _ERROR_CLASSES[found["kind"]]
    given = found["given"]
    return kind(*given) if kind in (JobFailedError, JobConfigError) else kind(*given[:3])


def _read_record(key: bytes) -> EndedJobRecord | None:
    content = _internal_kv_get(key, namespace=_KV_NAMESPACE)
    return None if content is None else decode_record(content)


def _kv_key(name: str) -> bytes:
    return _KEY_PREFIX + name.encode()
