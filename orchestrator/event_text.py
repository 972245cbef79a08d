"""What the user is told, in words: one good line for each thing, whatever the console."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.job_events import (
    Checkpointed,
    CheckpointFailed,
    FaultDetected,
    JobEvent,
    JobWarning,
    MetricsServed,
    Repaired,
    Resized,
    Resumed,
    RunAdopted,
    StateEntered,
    WorkersReady,
)
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.results import JobResult
from rayzero.workers.chaos.spec import FaultFired
from rayzero.workers.messages import LogLine


def format_step(record: StepRecord) -> str:
    """`loss 2.301 | 12,345 tokens/s | 0.12 s/step | 2 workers`"""
    parts = [] if record.loss is None else [f"loss {record.loss:.4f}"]
    if record.tokens_per_s is not None:
        parts.append(f"{record.tokens_per_s:,.0f} tokens/s")
    parts.append(f"{record.step_s:.3f} s/step")
    parts.append(f"{record.world_size} worker{'s' * (record.world_size != 1)}")
    return " | ".join(parts)


def event_lines(notice: JobEvent) -> Iterator[str]:
    """A notice in words; nothing for one that is shown in another way."""
    match notice:
        case LogLine():
            yield f"[rank {notice.rank}] {notice.text}"
        case JobWarning():
            yield f"warning: {notice.text}"
        case MetricsServed():
            yield f"page: {notice.url}/ (for Prometheus: {notice.url}/metrics)"
        case WorkersReady():
            for worker in notice.workers:
                yield f"worker {worker.index} is up on node {worker.node} (pid {worker.pid})"
        case StateEntered() if not notice.state.is_final:
            yield f"state: {notice.state}"
        case Resumed():
            yield f"resuming after step {notice.step}, from {notice.folder}"
        case RunAdopted():
            yield f"adopted a lost run, it stood at step {notice.step}"
        case FaultDetected():
            yield f"fault: {notice.text}"
        case FaultFired():
            yield f"injected fault: {notice.fault} on rank {notice.rank} in step {notice.step}"
        case Repaired() | Resized():
            yield _format_recovery(notice)
        case Checkpointed():
            yield (
                f"checkpoint of step {notice.step}: {notice.nbytes / 2**20:,.1f} MiB in "
                f"{notice.seconds:.2f} s, training stopped for {notice.stopped_s * 1e3:.0f} ms"
            )
        case CheckpointFailed():
            then = "given up" if notice.again_in_s is None else f"again in {notice.again_in_s:g} s"
            yield (
                f"warning: checkpoint of step {notice.step} failed (try {notice.tries}, {then}): "
                f"{notice.text}"
            )


def _format_recovery(passed: Repaired | Resized) -> str:
    """`repaired in 0.24 s: 3 -> 2 workers at step 41, none done again (notice 0.00, ...)`"""
    parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in passed.seconds.items())
    sizes = f"{passed.world_size_before} -> {passed.world_size} workers after step {passed.step}"
    if isinstance(passed, Resized):
        return f"resized in {passed.total_s:.2f} s ({passed.reason}): {sizes} ({parts})"
    redone = passed.steps_redone
    again = f"{redone} step{'s' * (redone != 1)} done again" if redone else "no step done again"
    return f"repaired in {passed.total_s:.2f} s: {sizes}, {again} ({parts})"


def summary_lines(result: JobResult) -> Iterator[str]:
    """The summary, without what it says nothing of."""
    for key, value in result.metrics.items():
        sizes = key.endswith("_bytes")
        if isinstance(value, dict):
            parts = {
                name: part
                for name, part in value.items()
                if part is not None and (part or not sizes)
            }
            text = ", ".join(f"{name} {_format_value(part, sizes)}" for name, part in parts.items())
        elif isinstance(value, list):
            text = ", ".join(_format_value(part, sizes) for part in value)
        else:
            text = "" if value is None else _format_value(value, sizes)
        if text:
            yield f"{key}: {text}"
    yield f"summary: {result.summary_path}"


def print_error(error: RayzeroError) -> None:
    print(f"error: {error}", file=sys.stderr, flush=True)


def format_bytes(nbytes: float) -> str:
    """`12.8 MiB`"""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def _format_value(value: Any, is_size: bool) -> str:
    if is_size and isinstance(value, int | float) and not isinstance(value, bool):
        return format_bytes(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
