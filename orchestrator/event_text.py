"""Text for the events of a job, its summary and its errors; shared by all consoles."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator import job_events
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.results import JobResult
from rayzero.orchestrator.top.format import format_size
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


def event_lines(event: job_events.JobEvent) -> Iterator[str]:
    """The lines for an event; none for an event that a console shows in another way."""
    match event:
        case LogLine():
            yield f"[rank {event.rank}] {event.text}"
        case job_events.JobWarning():
            yield f"warning: {event.text}"
        case job_events.MetricsServed():
            yield f"page: {event.url}/ (for Prometheus: {event.url}/metrics)"
        case job_events.WorkersReady():
            for worker in event.workers:
                yield f"worker {worker.index} is ready on node {worker.node} (pid {worker.pid})"
        case job_events.StateEntered() if not event.state.is_final:
            yield f"state: {event.state}"
        case job_events.Resumed():
            yield f"resuming after step {event.step}, from {event.folder}"
        case job_events.RunAdopted():
            yield f"adopted a lost run at step {event.step}, offline for {event.offline_s:.0f} s"
        case job_events.FaultDetected():
            yield f"fault: {event.text}"
        case FaultFired():
            yield f"injected fault: {event.fault} on rank {event.rank} in step {event.step}"
        case job_events.Repaired() | job_events.Resized():
            yield _format_recovery(event)
        case job_events.Checkpointed():
            yield (
                f"checkpoint of step {event.step}: {event.nbytes / 2**20:,.1f} MiB in "
                f"{event.seconds:.2f} s, training stopped for {event.stopped_s * 1e3:.0f} ms"
            )
        case job_events.CheckpointFailed():
            outcome = "given up" if event.again_in_s is None else f"next in {event.again_in_s:g} s"
            yield (
                f"warning: checkpoint of step {event.step} failed (try {event.tries}, {outcome}): "
                f"{event.text}"
            )


def _format_recovery(recovery: job_events.Repaired | job_events.Resized) -> str:
    """`repaired in 0.24 s: 3 -> 2 workers after step 41, no step recomputed (detect 0.00, ...)`"""
    parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in recovery.seconds.items())
    sizes = (
        f"{recovery.world_size_before} -> {recovery.world_size} workers after step {recovery.step}"
    )
    if isinstance(recovery, job_events.Resized):
        return f"resized in {recovery.total_s:.2f} s ({recovery.reason}): {sizes} ({parts})"
    redone = recovery.steps_redone
    recomputed = f"{redone or 'no'} step{'s' * (redone > 1)} recomputed"
    return f"repaired in {recovery.total_s:.2f} s: {sizes}, {recomputed} ({parts})"


def summary_lines(result: JobResult) -> Iterator[str]:
    """The summary, without empty values."""
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


def _format_value(value: Any, is_size: bool) -> str:
    if is_size and isinstance(value, int | float) and not isinstance(value, bool):
        return format_size(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
