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
from rayzero.engine.masking import redacted
from rayzero.orchestrator.errors import JobConfigError, JobFailedError, JobStoppedError
from rayzero.orchestrator.head.outcome import Ended, JobStatus
from rayzero.orchestrator.result import JobResult
from rayzero.orchestrator.states import State

KEPT = 100
"""Records in a cluster, one for a name; the oldest go."""
KEPT_S = 30 * 86400.0
"""How long."""
MAX_BYTES = 64 * 1024
"""What a training function returned is left out where it is more than that."""

_SMALL = 512
_NAMESPACE = b"rayzero"
_PREFIX = b"ended:"
_KINDS: Mapping[str, type[RayzeroError]] = {
    one.__name__: one for one in (ConfigError, JobConfigError, JobFailedError, JobStoppedError)
}


@dataclass(frozen=True)
class Record:
    """How one job ended. `status.at_s` is when."""

    status: JobStatus
    ended: Ended


def remember(record: Record) -> None:
    """Keeps a record, in place of an earlier one of that name. Waits for the cluster's head."""
    _internal_kv_put(_key(record.status.name), to_bytes(record), True, namespace=_NAMESPACE)
    found = sorted(recorded(), key=lambda one: one.status.at_s, reverse=True)
    oldest_s = time.time() - KEPT_S
    for place, one in enumerate(found):
        if place >= KEPT or one.status.at_s < oldest_s:
            forget(one.status.name)


def forget(name: str) -> None:
    """A job of that name begins."""
    _internal_kv_del(_key(name), namespace=_NAMESPACE)


def recall(name: str) -> Record | None:
    """How the last job of that name ended, if this cluster knows and can be asked."""
    try:
        return _read(_key(name)) if ray.is_initialized() else None
    except RayError:
        return None


def recorded() -> list[Record]:
    """All that this cluster knows, by name."""
    keys = sorted(_internal_kv_list(_PREFIX, namespace=_NAMESPACE))
    return [found for key in keys if (found := _read(key)) is not None]


def to_bytes(record: Record) -> bytes:
    """Without secrets."""
    ended, result, error = record.ended, record.ended.result, record.ended.error
    document: dict[str, Any] = {"status": asdict(record.status)}
    if result is not None:
        document["result"] = {**asdict(result), "summary_path": str(result.summary_path)}
    if error is not None:
        kind = next((name for name, one in _KINDS.items() if type(error) is one), "")
        fallback = "ConfigError" if isinstance(error, ConfigError) else "JobFailedError"
        traceback = getattr(error, "traceback", "")
        document["error"] = {
            "kind": kind or fallback,
            "given": [error.seen, error.allowed, error.fix, traceback[-MAX_BYTES // 4 :]],
        }
    content = json.dumps(redacted(document), default=str).encode()
    if len(content) > MAX_BYTES and result is not None:
        small = {key: one for key, one in result.metrics.items() if len(repr(one)) < _SMALL}
        slim = JobResult(result.name, small, result.summary_path)
        return to_bytes(Record(record.status, Ended(slim, ended.error)))
    return content


def parse(content: bytes) -> Record | None:
    """None for what was written by another version."""
    try:
        found = json.loads(content)
        status = found["status"]
        state = None if status["state"] is None else State(status["state"])
        ended = Ended(error=_error(found["error"])) if "error" in found else Ended()
        if "result" in found:
            result = found["result"]
            path = Path(result["summary_path"])
            ended = Ended(JobResult(result["name"], result["metrics"], path))
        return Record(JobStatus(**{**status, "state": state}), ended)
    except (ValueError, KeyError, TypeError):
        return None


def _error(found: Mapping[str, Any]) -> RayzeroError:
    kind = _KINDS[found["kind"]]
    given = found["given"]
    return kind(*given) if kind in (JobFailedError, JobConfigError) else kind(*given[:3])


def _read(key: bytes) -> Record | None:
    content = _internal_kv_get(key, namespace=_NAMESPACE)
    return None if content is None else parse(content)


def _key(name: str) -> bytes:
    return _PREFIX + name.encode()
