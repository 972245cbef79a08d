"""Text for the events of a job, its summary and its errors; shared by all consoles."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator import job_events
from rayzero.orchestrator.errors import JobStoppedError
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.results import JobResult
from rayzero.orchestrator.top.format import count_of, format_duration, format_size, plain_class
from rayzero.workers.chaos.spec import FaultFired
from rayzero.workers.messages import LogLine


def format_step(record: StepRecord) -> str:
    """Returns `loss 2.301 | 12,345 tokens/s | 0.12 s/step | 2 workers`."""
    parts = [] if record.loss is None else [f"loss {record.loss:.4f}"]
    if record.tokens_per_s is not None:
        parts.append(f"{record.tokens_per_s:,.0f} tokens/s")
    parts.append(f"{record.step_s:.3f} s/step")
    parts.append(count_of(record.world_size, "worker"))
    return " | ".join(parts)


_WORKERS_ENDED = (
    "its workers have ended (they outlive a head that keeps its state in a store; "
    "`rayzero doctor --address` tells whether this one does)"
)


def _describe_reattachment(event: job_events.Reattached) -> str:
    text = (
        f"re-attached to generation {event.generation} at step {event.step}, after "
        f"{event.offline_s:.0f} s without the job's process"
    )
    for role, count in event.roles.items():
        text += f", with {count_of(count, 'worker')} of role {role}"
    if not event.lost_ranks:
        return text
    ranks = ", ".join(map(str, event.lost_ranks))
    return f"{text}; lost meanwhile: rank{'s' * (len(event.lost_ranks) > 1)} {ranks}"


def event_lines(event: job_events.JobEvent) -> Iterator[str]:
    """Yields the lines for an event; none for an event that a console shows in another way."""
    match event:
        case LogLine():
            yield f"[{event.speaker}] {event.text}"
        case job_events.JobWarning():
            yield f"warning: {event.text}"
        case job_events.MetricsServed():
            yield f"page: {event.url}/ (for Prometheus: {event.url}/metrics)"
        case job_events.WorkersReady():
            for worker in event.workers:
                yield f"worker {worker.index} is ready on node {worker.node} (pid {worker.pid})"
        case job_events.ResourcesAwaited() if event.text:
            limit = f"for up to {event.limit_s:g} s (workers.start_timeout_s)"
            yield f"waiting {limit} for {event.text}"
        case job_events.StateEntered() if not event.state.is_final:
            yield f"state: {event.state}"
        case job_events.Resumed():
            yield f"resuming after step {event.step}, from {event.folder}"
        case job_events.RunAdopted():
            since = f"at step {event.step}, offline for {event.offline_s:.0f} s"
            yield f"adopted a lost run {since}: {_WORKERS_ENDED}"
        case job_events.Reattached():
            yield _describe_reattachment(event)
        case job_events.FaultDetected():
            yield f"fault: {event.text}"
        case job_events.NodeChecked():
            passes = f"node {event.node} passes its health check again"
            yield f"node {event.node} is avoided: {event.text}" if event.text else passes
        case job_events.RoleWorkerReady():
            worker = event.worker
            yield f"{event.role} {event.number} is ready on node {worker.node} (pid {worker.pid})"
        case job_events.RoleWorkerEnded():
            yield f"{event.role} {event.number} has ended"
        case job_events.RoleFault():
            yield f"fault: {event.text}"
        case FaultFired():
            yield f"injected fault: {event.fault} on {event.where} in step {event.step}"
        case job_events.Repaired() | job_events.Resized():
            yield _format_recovery(event)
        case job_events.Checkpointed():
            yield (
                f"checkpoint of step {event.step}: {format_size(event.nbytes)} in "
                f"{event.seconds:.2f} s, training stopped for {event.stopped_s * 1e3:.0f} ms"
            )
        case job_events.CheckpointFailed():
            outcome = "given up" if event.again_in_s is None else f"next in {event.again_in_s:g} s"
            yield (
                f"warning: checkpoint of step {event.step} failed (try {event.tries}, {outcome}): "
                f"{event.text}"
            )


def _format_recovery(recovery: job_events.Repaired | job_events.Resized) -> str:
    """Returns `repaired in 0.24 s: 3 -> 2 workers after step 41, no step recomputed (detect 0.00,
    ...)`."""
    parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in recovery.seconds.items())
    sizes = (
        f"{recovery.world_size_before} -> {recovery.world_size} workers after step {recovery.step}"
    )
    if isinstance(recovery, job_events.Resized):
        return f"resized in {recovery.total_s:.2f} s ({recovery.reason}): {sizes} ({parts})"
    redone = recovery.steps_redone
    recomputed = count_of(redone, "step") if redone else "no step"
    return f"repaired in {recovery.total_s:.2f} s: {sizes}, {recomputed} recomputed ({parts})"


def summary_lines(result: JobResult) -> Iterator[str]:
    """Yields lines that say how the job went, where its results are, and what can be done with
    them; then what the training function returned."""
    own = {key: value for key, value in result.metrics.items() if key not in result.returned}
    yield f"succeeded: {', '.join(_progress_parts(own))}"
    if faults := own.get("faults"):
        counts = ", ".join(f"{name} {number}" for name, number in faults.items())
        redone = own.get("steps_redone")
        recomputed = count_of(redone, "step") if redone else "no step"
        yield f"faults: {counts}; {count_of(own.get('repairs', 0), 'repair')}, {recomputed} redone"
    if held := {name: size for name, size in own.get("peak_bytes", {}).items() if size}:
        sizes = (f"{plain_class(name)} {format_size(size)}" for name, size in held.items())
        yield f"memory of the largest rank: {', '.join(sizes)}"
    if folder := own.get("newest_checkpoint"):
        yield f"checkpoint: {folder}"
        yield f"  to export it: rayzero ckpt export {folder} --to FOLDER"
        yield "  to train on from it: the same job with more steps"
    for key, value in result.returned.items():
        if text := _format_returned(value):
            yield f"{key}: {text}"
    yield f"summary: {result.summary_path}"


def _progress_parts(own: Mapping[str, Any]) -> Iterator[str]:
    """Yields `80 steps in 12.3 s`, `2 workers`, `loss 8.1 to 2.5`, `12,345 tokens/s`."""
    steps = count_of(own["steps"], "step")
    if own.get("steps_trained") == 0:
        steps = f"no step was trained (after {steps})"
    yield steps + (f" in {format_duration(own['seconds'])}" if "seconds" in own else "")
    if sizes := own.get("world_sizes"):
        yield f"{' then '.join(map(str, sizes))} worker{'s' * (sizes != [1])}"
    if (loss := own.get("loss")) and loss["last"] is not None:
        yield f"loss {_format_value(loss['first'])} to {_format_value(loss['last'])}"
    if (tokens_per_s := own.get("tokens_per_s")) is not None:
        yield f"{tokens_per_s:,.0f} tokens/s"


def _format_returned(value: Any) -> str:
    """Formats a returned value, without parts that are None; empty if nothing is left."""
    if isinstance(value, dict):
        known = {name: part for name, part in value.items() if part is not None}
        return ", ".join(f"{name} {_format_value(part)}" for name, part in known.items())
    if isinstance(value, list):
        return ", ".join(map(_format_value, value))
    return "" if value is None else _format_value(value)


def print_error(error: RayzeroError) -> None:
    """Prints an error to stderr. A requested stop is no error, and gets no `error:` prefix."""
    prefix = "" if isinstance(error, JobStoppedError) else "error: "
    print(f"{prefix}{error}", file=sys.stderr, flush=True)


def _format_value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
