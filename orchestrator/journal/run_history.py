"""Fold journal -> RunHistory; may it be adopted.

From the lines of a journal to what is known of the last run. Pure.

A line is a JSON object with `at_s` (Unix time), `kind`, and what the kind has. A line that is torn
or of a later version is passed over.

Whether a lost run can be gone on with by what was submitted now. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rayzero.engine.config import parse_config, resolve_batch_sizes
from rayzero.engine.errors import ConfigError
from rayzero.engine.redact import redact_document
from rayzero.orchestrator.job_file import (
    ADOPTABLE_KEYS,
    SpecDiff,
    diff_documents,
    not_covered_by,
    to_document,
)
from rayzero.orchestrator.machine import FINAL_STATES
from rayzero.orchestrator.policies.failure import Fault, FaultCause
from rayzero.orchestrator.spec import JobSpec
from rayzero.workers.messages import WorkerInfo

MAX_ENTRIES = 256


_LISTED_KINDS = ("fault", "repaired", "resized", "checkpoint")


@dataclass(frozen=True)
class RunHistory:
    """What the journal knows of a job's last run.

    Args:
        spec: of its last process, without secrets.
        run: the id of the last process.
        working_dir: the submitter's.
        by_value: whether the training function was no name but a function.
        began_at_s, at_s: of its first and last line, as Unix time.
        step: it had finished so many at least.
        best_step: the most it ever had, before it went back.
        scaled: the limits for the number of workers, if they were changed while it ran.
        counted: what its metrics had counted: `seconds` by cause, and totals.
        faults: that count, their times Unix times.
        repaired: how many repairs, by cause.
        written, failed: checkpoints.
        adoptions: how often it was gone on with.
        ended: how it ended; empty while it has not.
        turns: the newest `TURNS` lines of each kind that a page shows, by kind.
    """

    spec: dict[str, Any]
    run: str
    working_dir: str
    by_value: bool
    began_at_s: float
    last_at_s: float
    state: str = "pending"
    step: int = 0
    best_step: int = 0
    generation: int = 0
    world_size: int = 0
    scaled_limits: tuple[int, int] | None = None
    counters: Mapping[str, Any] = field(default_factory=dict)
    faults: tuple[Fault, ...] = field(default_factory=tuple)
    repairs_by_cause: Mapping[str, int] = field(default_factory=dict)
    resizes: int = 0
    steps_redone: int = 0
    checkpoint_step: int | None = None
    checkpoint_at_s: float = 0.0
    checkpoints_written: int = 0
    checkpoints_failed: int = 0
    adoptions: int = 0
    end_state: str = ""
    error: str = ""
    entries: Mapping[str, tuple[dict[str, Any], ...]] = field(default_factory=dict)

    @property
    def total_repairs(self) -> int:
        return sum(self.repairs_by_cause.values())


def begins_run(line: str) -> bool:
    """Whether what is before that line is of other runs."""
    found = _decode_line(line)
    return found.get("kind") == "begun" and not found.get("adopted")


def is_step_line(line: str) -> bool:
    """Whether it says nothing but how far the run is."""
    return '"kind": "step"' in line and _decode_line(line).get("kind") == "step"


def fold_journal(lines: Iterable[str]) -> RunHistory | None:
    """The run that the lines end with; None if they tell of none."""
    past: RunHistory | None = None
    for line in lines:
        found = _decode_line(line)
        if not found:
            continue
        try:
            past = _apply_begun(past, found) if found["kind"] == "begun" else _apply(past, found)
        except (KeyError, TypeError, ValueError):
            continue
    return past


def _decode_line(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    known = isinstance(found, dict) and isinstance(found.get("at_s"), int | float)
    return found if known and isinstance(found.get("kind"), str) else {}


def _apply_begun(past: RunHistory | None, found: dict[str, Any]) -> RunHistory:
    at_s, spec, run = float(found["at_s"]), dict(found["spec"]), str(found["run"])
    if past is not None and found.get("adopted"):
        return replace(
            past,
            spec=spec,
            run=run,
            last_at_s=at_s,
            adoptions=past.adoptions + 1,
            end_state="",
            error="",
        )
    return RunHistory(spec, run, str(found["working_dir"]), bool(found["by_value"]), at_s, at_s)


def _apply(past: RunHistory | None, found: dict[str, Any]) -> RunHistory | None:
    if past is None:
        return None
    past = replace(past, last_at_s=float(found["at_s"]))
    if isinstance(counted := found.get("counted"), dict):
        past = replace(past, counters=counted)
    if found["kind"] in _LISTED_KINDS or found.get("state") == "running":
        past = replace(past, entries=_append_entry(past.entries, found))
    match found["kind"]:
        case "moved":
            state = str(found["state"])
            return replace(
                past,
                state=state,
                generation=max(past.generation, int(found["generation"])),
                world_size=int(found["world_size"]),
                end_state=state if state in FINAL_STATES else past.end_state,
                **_step_fields(past, int(found["step"])),
            )
        case "step":
            return replace(past, **_step_fields(past, int(found["step"])))
        case "picked":
            redone = past.steps_redone + int(found["steps_redone"])
            return replace(past, step=int(found["step"]), steps_redone=redone)
        case "fault":
            return replace(past, faults=(*past.faults, _decode_fault(found)))
        case "repaired":
            cause = str(found["cause"])
            repaired = {**past.repairs_by_cause, cause: past.repairs_by_cause.get(cause, 0) + 1}
            return replace(past, repairs_by_cause=repaired)
        case "resized":
            return replace(past, resizes=past.resizes + 1)
        case "checkpoint":
            step = int(found["step"])
            return replace(
                past,
                checkpoint_step=step,
                checkpoint_at_s=past.last_at_s,
                checkpoints_written=past.checkpoints_written + 1,
                **_step_fields(past, max(past.step, step)),
            )
        case "checkpointfailed":
            return replace(past, checkpoints_failed=past.checkpoints_failed + 1)
        case "scaled":
            return replace(past, scaled_limits=(int(found["least"]), int(found["most"])))
        case "ended":
            return replace(past, end_state=str(found["state"]), error=str(found.get("error", "")))
    return past


def _append_entry(
    turns: Mapping[str, tuple[dict[str, Any], ...]], found: dict[str, Any]
) -> dict[str, tuple[dict[str, Any], ...]]:
    kind = found["kind"]
    return {**turns, kind: (*turns.get(kind, ()), found)[-MAX_ENTRIES:]}


def _step_fields(past: RunHistory, step: int) -> dict[str, Any]:
    return {"step": step, "best_step": max(past.best_step, step)}


def _decode_fault(found: dict[str, Any]) -> Fault:
    rank = found["rank"]
    return Fault(
        FaultCause(found["cause"]),
        WorkerInfo(**found["worker"]),
        None if rank is None else int(rank),
        int(found["step"]),
        str(found["detail"]),
        float(found["at_s"]),
        int(found["generation"]),
    )


def why_not_adoptable(past: RunHistory, spec: JobSpec) -> ConfigError | None:
    """Why not; None when it can."""
    found = not_covered_by(
        diff_documents(past.spec, redact_document(to_document(spec))), ADOPTABLE_KEYS
    )
    found += _global_batch_diff(past, spec)
    if not found:
        return None
    listed = "\n".join(f"    {one}" for one in found)
    return ConfigError(
        f"the last run of job {spec.name!r} was lost at step {past.step} and has not ended, and "
        f"this is another job:\n{listed}",
        allowed="the same training: entrypoint, args, seed, optimizer, schedule, global batch",
        fix=f"the job file, another name, or `rayzero stop {spec.name}`, which gives that run up",
    )


def faults_on_clock(past: RunHistory, now_s: float, unix_s: float) -> list[Fault]:
    """The faults of the past by the clock of today's controller."""
    return [replace(one, at_s=now_s - (unix_s - one.at_s)) for one in past.faults]


def _global_batch_diff(past: RunHistory, spec: JobSpec) -> list[SpecDiff]:
    """The global batch that the micro-batch and its number amount to."""
    if not isinstance(spec.engine, dict) or "train_batch_size" in spec.engine:
        return []
    before, after = past.spec.get("engine"), spec.engine
    try:
        least = int(past.spec["workers"]["min"])
        old = resolve_batch_sizes(parse_config(dict(before or {})), least).global_batch
        new = resolve_batch_sizes(parse_config(after), spec.workers.min).global_batch
    except (ConfigError, KeyError, TypeError, ValueError):
        return []
    return [] if old == new else [SpecDiff("engine: the global batch", str(old), str(new))]
