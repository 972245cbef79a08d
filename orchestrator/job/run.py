"""The parts of one run of a job in its process, from the lease of its folder to its summary."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rayzero.orchestrator.aio import Clock, with_timeout
from rayzero.orchestrator.background_writer import BackgroundWriter
from rayzero.orchestrator.checkpoint_store import CheckpointStore
from rayzero.orchestrator.cluster.vault_group import VaultGroup
from rayzero.orchestrator.cluster.worker_group import WorkerGroup
from rayzero.orchestrator.control.context import Dependencies
from rayzero.orchestrator.control.controller import Controller
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.job.lease import Lease
from rayzero.orchestrator.job.past_runs import PastRuns
from rayzero.orchestrator.job.recorder import EventBuffer, JobRecorder
from rayzero.orchestrator.job_events import MetricsServed
from rayzero.orchestrator.metrics.telemetry import RunFiles, Telemetry
from rayzero.orchestrator.metrics.trackers import Trackers
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.results import JobResult, write_summary

SUMMARY_RETRY_S = 1.0  # pause between two attempts to write `summary.json`


@dataclass(frozen=True)
class JobRun:
    """The parts of a run; complete from the start."""

    recorder: JobRecorder
    telemetry: Telemetry
    trackers: Trackers
    controller: Controller


async def open_run(
    plan: JobPlan,
    can_grow: bool,
    past: PastRuns,
    lease: Lease,
    buffer: EventBuffer,
    writer: BackgroundWriter,
    warn: Callable[[str], None],
) -> JobRun:
    """Builds a run of a job whose folder is leased. Raises as `Telemetry`.

    Args:
        past: the lost run to adopt, or the one to continue from.
        buffer, writer: where its events go; they outlive the run.
        warn: thread-safe.
    """
    # It exists if and only if the last run succeeded.
    await asyncio.to_thread(plan.summary_path.unlink, missing_ok=True)
    clock, events = Clock(), EventBus(past.lost)
    telemetry = await asyncio.to_thread(lambda: Telemetry(plan, clock, writer, events))
    if past.lost is not None:
        await asyncio.to_thread(telemetry.restore_curves, plan.output_dir, warn)
    # After the telemetry, whose wall time its entries include.
    recorder = JobRecorder(plan, buffer, writer, events, telemetry.seconds, lease.check)
    recorder.begin(adopted=past.lost is not None)
    trackers = Trackers(plan, events.facts.began_at_s, warn)
    trackers.subscribe_to(events)
    RunFiles(plan.output_dir, telemetry, writer).subscribe_to(events)
    if telemetry.port_note:
        warn(telemetry.port_note)
    if telemetry.url is not None:
        events.emit(MetricsServed(telemetry.url))
    if plan.output_is_temporary:
        warn(
            f"Ray removes {plan.output_dir} some time after the job, with its log and summary: "
            "checkpoint.path with a shared folder or a URL keeps them"
        )
    vaults = VaultGroup(plan.worker_spec)
    workers = WorkerGroup(plan.worker_spec, clock, can_grow, vaults)
    store = CheckpointStore(plan, warn, adopting=past.lost is not None, check_lease=lease.check)

    async def flush_journal(limit_s: float) -> bool:
        return await asyncio.to_thread(recorder.flush_journal, limit_s)

    dependencies = Dependencies(workers, vaults, store, events, clock, flush_journal)
    controller = Controller(plan, dependencies, past.lost, past.last)
    return JobRun(recorder, telemetry, trackers, controller)


async def save_summary(
    result: JobResult, clock: Clock, limit_s: float, warn: Callable[[str], None]
) -> None:
    """Writes `summary.json`, with retries: an outage of its disk is shorter than the limit. Raises
    JobFailedError if the disk does not take it, or does not answer."""
    reasons: list[str] = []

    async def write() -> None:
        while True:
            try:
                return await asyncio.to_thread(write_summary, result)
            except OSError as error:
                if not reasons:
                    warn(f"{result.summary_path} cannot be written, retrying: {error}")
                reasons.append(str(error))
            await clock.sleep(SUMMARY_RETRY_S)

    try:
        await with_timeout(clock, limit_s, write())
    except TimeoutError:
        reason = reasons[-1] if reasons else "no answer from the disk"
        raise JobFailedError(
            f"training has succeeded, but {result.summary_path} cannot be written for "
            f"{limit_s:g} s: {reason}",
            fix="checkpoint.path, the disk it is on, or a longer recovery.hang_timeout_s, of which "
            "half is waited for",
        ) from None
