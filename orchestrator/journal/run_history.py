"""The state of a job's last run, folded from its journal entries; and whether it can be adopted.

Pure. A journal entry is a JSON object with `at_s` (Unix time), `kind`, and the fields of that kind.
Unknown kinds and entries of a later version are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from typing import Any

from pydantic import TypeAdapter

from rayzero.engine.config import parse_config, resolve_batch_sizes
from rayzero.engine.errors import ConfigError
from rayzero.engine.redact import redact_document
from rayzero.orchestrator.job_file import (
    ADOPTABLE_KEYS,
    diff_documents,
    not_covered_by,
    to_document,
)
from rayzero.orchestrator.machine import FINAL_STATES
from rayzero.orchestrator.numbers import MAX_COUNT, Count, UnixTime
from rayzero.orchestrator.policies.failure import Fault, FaultCause
from rayzero.orchestrator.spec import JobSpec
from rayzero.workers.messages import WorkerInfo

MAX_ENTRIES = 256
"""Entries of one kind that are kept for display; the newest."""

MAX_FAULTS = 1000
"""Faults that are kept for budgets and counts; the newest."""

_LISTED_KINDS = ("repaired", "resized", "checkpoint")


@dataclass(frozen=True)
class RunHistory:
    """The state of a job's last run.

    Args:
        spec: of its last process, without secrets.
        run: the id of its last process.
        working_dir: the submitter's.
        by_value: the training function was submitted as an object, not by name.
        source: a hash of its code, of its last process; empty if unknown.
        began_at_s, last_at_s: Unix time of its first and last entry.
        step: finished steps; `best_step`: the most it ever had, before it went back.
        reserved_generations: its controllers gave no generation a greater number.
        scaled_limits: the least and the most workers, if they were changed while it ran.
        counters: of its metrics: `seconds` by cause, and totals.
        fault_entries: the newest `MAX_FAULTS`.
        end_state: empty while it has not ended.
        entries: the newest `MAX_ENTRIES` entries of each kind that the status page lists.
    """

    spec: dict[str, Any]
    run: str
    working_dir: str
    by_value: bool
    began_at_s: UnixTime
    last_at_s: UnixTime
    state: str = "pending"
    step: Count = 0
    best_step: Count = 0
    generation: Count = 0
    reserved_generations: Count = 0
    world_size: Count = 0
    scaled_limits: tuple[Count, Count] | None = None
    counters: Mapping[str, Any] = field(default_factory=dict)
    fault_entries: tuple[dict[str, Any], ...] = ()
    repairs_by_cause: Mapping[str, Count] = field(default_factory=dict)
    resizes: Count = 0
    steps_redone: Count = 0
    checkpoint_step: Count | None = None
    checkpoint_at_s: UnixTime = 0.0
    checkpoints_written: Count = 0
    checkpoints_failed: Count = 0
    adoptions: Count = 0
    end_state: str = ""
    error: str = ""
    source: str = ""
    entries: Mapping[str, tuple[dict[str, Any], ...]] = field(default_factory=dict)

    @property
    def steps(self) -> int | None:
        """The step at which it ends; None if it has none."""
        steps = self.spec.get("steps")
        if isinstance(steps, int) and not isinstance(steps, bool) and 0 <= steps <= MAX_COUNT:
            return steps
        return None

    @property
    def loss(self) -> float | None:
        """The loss of its last step, if that was counted and is finite."""
        loss = self.counters.get("loss")
        return loss if isinstance(loss, float) and isfinite(loss) else None

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time by cause, as counted."""
        counted = self.counters.get("seconds")
        items = counted.items() if isinstance(counted, Mapping) else ()
        return {
            cause: float(s)
            for cause, s in items
            if isinstance(s, int | float) and abs(s) <= MAX_COUNT
        }

    @property
    def total_repairs(self) -> int:
        return sum(self.repairs_by_cause.values())

    @property
    def faults(self) -> list[Fault]:
        """Their times are Unix times."""
        return [_decode_fault(entry) for entry in self.fault_entries]

    def to_json(self) -> bytes:
        document = {item.name: getattr(self, item.name) for item in fields(self)}
        return json.dumps({"format": 2, **document}, default=str).encode()

    @classmethod
    def from_json(cls, content: bytes) -> RunHistory | None:
        """None for what is not the state of a run."""
        try:
            history = TypeAdapter(cls).validate_json(content)
            known = history.end_state in ("", *FINAL_STATES)
            known = known and all(isfinite(fault.at_s) for fault in history.faults)
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
            return None
        return history if known else None


def fold_entries(entries: Iterable[Mapping[str, Any]]) -> RunHistory | None:
    """The run that these entries end with; None if there is none."""
    history: RunHistory | None = None
    for entry in entries:
        try:
            history = apply_entry(history, entry)
        except (KeyError, TypeError, ValueError, OverflowError):
            continue  # of a later version, or damaged
    return history


def apply_entry(history: RunHistory | None, entry: Mapping[str, Any]) -> RunHistory | None:
    """The history after one more entry.

    Raises:
        KeyError, TypeError, ValueError: the entry lacks what its kind has.
    """
    if entry["kind"] == "begun":
        return _begin(history, entry)
    if history is None:
        return None
    kind, at_s = entry["kind"], float(entry["at_s"])
    changes: dict[str, Any] = {"last_at_s": at_s, "entries": _list_entry(history.entries, entry)}
    if isinstance(counters := entry.get("counted"), dict):
        changes["counters"] = counters
    match kind:
        case "moved":
            state = str(entry["state"])
            changes |= {
                "state": state,
                "generation": max(history.generation, int(entry["generation"])),
                "world_size": int(entry["world_size"]),
                "end_state": state if state in FINAL_STATES else history.end_state,
                "step": int(entry["step"]),
            }
        case "step":
            changes["step"] = int(entry["step"])
        case "picked":
            changes["step"] = int(entry["step"])
            changes["steps_redone"] = history.steps_redone + int(entry["steps_redone"])
        case "fault":
            _decode_fault(entry)
            changes["fault_entries"] = (*history.fault_entries, dict(entry))[-MAX_FAULTS:]
        case "repaired":
            cause = str(entry["cause"])
            count = history.repairs_by_cause.get(cause, 0) + 1
            changes["repairs_by_cause"] = {**history.repairs_by_cause, cause: count}
        case "resized":
            changes["resizes"] = history.resizes + 1
        case "checkpoint":
            step = int(entry["step"])
            changes |= {
                "checkpoint_step": step,
                "checkpoint_at_s": at_s,
                "checkpoints_written": history.checkpoints_written + 1,
                "step": max(history.step, step),
            }
        case "checkpointfailed":
            changes["checkpoints_failed"] = history.checkpoints_failed + 1
        case "removed":
            changes |= {"checkpoint_step": None, "entries": {**history.entries, "checkpoint": ()}}
        case "scaled":
            changes["scaled_limits"] = (int(entry["least"]), int(entry["most"]))
        case "reserved":
            changes["reserved_generations"] = max(history.reserved_generations, int(entry["last"]))
        case "ended":
            changes["end_state"] = str(entry["state"])
            changes["error"] = str(entry.get("error", ""))
    changes["best_step"] = max(history.best_step, changes.get("step", 0))
    return replace(history, **changes)


def _list_entry(
    lists: Mapping[str, tuple[dict[str, Any], ...]], entry: Mapping[str, Any]
) -> Mapping[str, tuple[dict[str, Any], ...]]:
    """`RunHistory.entries` after one more entry."""
    kind = entry["kind"]
    if kind == "pruned":
        written, removed = lists.get("checkpoint", ()), set(entry["steps"])
        left = tuple(item for item in written if item["step"] not in removed)
        return {**lists, "checkpoint": left}
    if kind not in _LISTED_KINDS and entry.get("state") != "running":
        return lists
    listed = {key: value for key, value in entry.items() if key != "counted"}
    return {**lists, kind: (*lists.get(kind, ()), listed)[-MAX_ENTRIES:]}


def _begin(history: RunHistory | None, entry: Mapping[str, Any]) -> RunHistory:
    at_s = float(entry["at_s"])
    spec = dict(entry["spec"])
    run = str(entry["run"])
    if history is None or not entry.get("adopted"):
        begun = RunHistory(
            spec, run, str(entry["working_dir"]), bool(entry["by_value"]), at_s, at_s
        )
    else:
        adoptions = history.adoptions + 1
        begun = replace(
            history, spec=spec, run=run, last_at_s=at_s, adoptions=adoptions, end_state="", error=""
        )
    return replace(begun, source=str(entry.get("source", "")))


def _decode_fault(entry: Mapping[str, Any]) -> Fault:
    names = ("rank", "step", "detail", "generation")
    fields = {name: entry[name] for name in names} | {"at_s": float(entry["at_s"])}
    return Fault(FaultCause(entry["cause"]), WorkerInfo(**entry["worker"]), **fields)


def why_not_adoptable(history: RunHistory, spec: JobSpec) -> ConfigError | None:
    """Why this job must not continue a lost run; None if it may."""
    document = redact_document(to_document(spec))
    diffs = not_covered_by(diff_documents(history.spec, document), ADOPTABLE_KEYS)
    diffs += global_batch_diff(history, spec)
    if not diffs:
        return None
    listed = "\n".join(f"    {diff}" for diff in diffs)
    return ConfigError(
        f"the last run of job {spec.name!r} was lost at step {history.step} before its end, and "
        f"this job differs from it:\n{listed}",
        allowed="the same training: entrypoint, args, seed, optimizer, schedule, global batch",
        fix=f"the job file, another name, or `rayzero stop {spec.name}`, which gives that run up",
    )


def faults_on_clock(history: RunHistory, now_s: float, unix_s: float) -> list[Fault]:
    """The faults of a lost run, their times on this controller's clock; none is in the future,
    where the machine's time was set back."""
    return [replace(fault, at_s=now_s - max(0.0, unix_s - fault.at_s)) for fault in history.faults]


def global_batch_diff(history: RunHistory, spec: JobSpec) -> list[str]:
    """Compares the global batches, where they follow from the micro-batch size."""
    if not isinstance(spec.engine, dict) or "train_batch_size" in spec.engine:
        return []
    before, after = history.spec.get("engine"), spec.engine
    try:
        workers = int(history.spec["workers"]["min"])
        old = resolve_batch_sizes(parse_config(dict(before or {})), workers).global_batch
        new = resolve_batch_sizes(parse_config(after), spec.workers.min).global_batch
    except (ConfigError, KeyError, TypeError, ValueError):
        return []
    return [] if old == new else [f"engine: the global batch: {old} -> {new}"]
