"""Metrics of faults, recoveries, replicas, checkpoints and goodput."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rayzero.orchestrator.metrics.components import ReplicaLevel
from rayzero.orchestrator.metrics.series import (
    JobReading,
    JobSeries,
    Sample,
    Samples,
    counter,
    gauge,
    histogram,
)
from rayzero.orchestrator.policies.failure import FaultCause


def _replicas(read: Callable[[ReplicaLevel], Sample]) -> Callable[[JobReading], Samples]:
    """Values by place: vaults of the ranks' own nodes, and of other nodes."""
    return lambda r: {place: read(level) for place, level in r.job.replicas.by_location.items()}


RECOVERY_GROUPS: Mapping[str, tuple[JobSeries, ...]] = {
    "Faults": (
        counter(
            "rayzero_faults_total",
            "faults",
            "Faults that were recorded, by root cause.",
            lambda r: {str(cause): r.job.faults.faults_by_cause[cause] for cause in FaultCause},
            "cause",
        ),
        gauge(
            "rayzero_faults_in_window",
            "faults",
            "Hardware faults that currently count against the fault budget.",
            lambda r: r.job.faults.budget_used(r.now.clock_s),
        ),
        gauge(
            "rayzero_fault_budget",
            "faults",
            "Hardware faults that are allowed within the window.",
            lambda r: r.job.faults.budget.max_faults,
        ),
        counter(
            "rayzero_repairs_total",
            "repairs",
            "Faults that the job has recovered from.",
            lambda r: {str(cause): r.job.faults.repairs_by_cause[cause] for cause in FaultCause},
            "cause",
        ),
        counter(
            "rayzero_resizes_total",
            "resizes",
            "Completed changes of membership without a fault.",
            lambda r: r.job.faults.resizes,
        ),
        histogram(
            "rayzero_recovery_seconds",
            "Time from the first sign of a fault to the next finished step, without that step.",
            lambda r: r.job.faults.recovery_time,
        ),
        histogram(
            "rayzero_recovery_phase_seconds",
            "Duration of the phases of a recovery.",
            lambda r: dict(sorted(r.job.faults.phase_times.items())),
            "phase",
        ),
        counter(
            "rayzero_steps_redone_total",
            "steps",
            "Finished steps that were lost and had to be trained again.",
            lambda r: r.job.faults.steps_redone,
        ),
        gauge(
            "rayzero_replica_step",
            "steps",
            "The newest step of which the vaults hold every rank's shard.",
            _replicas(lambda level: level.step),
            "place",
        ),
        gauge(
            "rayzero_replica_timestamp_seconds",
            "seconds",
            "When that step finished.",
            _replicas(lambda level: None if level.step is None else level.at_unix_s),
            "place",
        ),
        gauge(
            "rayzero_replica_unprotected_since_timestamp_seconds",
            "seconds",
            "Training since this time is in no replica: when the newest replicated step finished, "
            "or, before there is one, the first step that was to be replicated.",
            _replicas(lambda level: level.unprotected_since_unix_s),
            "place",
        ),
        gauge(
            "rayzero_replica_bytes",
            "bytes",
            "Bytes that vaults hold of their own nodes' ranks (`node`), and that the newest step "
            "takes on other nodes (`other`).",
            _replicas(lambda level: None if level.step is None else level.nbytes),
            "place",
        ),
    ),
    "Checkpoints": (
        counter(
            "rayzero_checkpoints_total",
            "checkpoints",
            "Checkpoints written by this run.",
            lambda r: r.job.checkpoints.written,
        ),
        counter(
            "rayzero_checkpoint_failures_total",
            "tries",
            "Failed attempts to write a checkpoint.",
            lambda r: r.job.checkpoints.failed,
        ),
        gauge(
            "rayzero_checkpoint_step",
            "steps",
            "Step of the newest checkpoint.",
            lambda r: r.job.checkpoints.step,
        ),
        gauge(
            "rayzero_checkpoint_timestamp_seconds",
            "seconds",
            "When the newest checkpoint was committed, or when the job resumed from it.",
            lambda r: r.job.checkpoints.at_unix_s if r.job.checkpoints.step is not None else None,
        ),
        gauge(
            "rayzero_checkpoint_unprotected_since_timestamp_seconds",
            "seconds",
            "Training since this time is in no checkpoint: when the newest was committed or, before"
            " there is one, when this run's first step finished. Only with checkpoint.every_steps.",
            lambda r: r.job.checkpoints.unprotected_since_unix_s,
        ),
        gauge(
            "rayzero_checkpoint_bytes",
            "bytes",
            "Size of the newest checkpoint.",
            lambda r: r.job.checkpoints.nbytes or None,
        ),
        histogram(
            "rayzero_checkpoint_seconds",
            "Time from the pinned step to the committed manifest, in the background.",
            lambda r: r.job.checkpoints.write_time,
        ),
        histogram(
            "rayzero_checkpoint_stall_seconds",
            "Time that training was stopped for a checkpoint, on the slowest rank.",
            lambda r: r.job.checkpoints.stall_time,
        ),
    ),
    "Goodput": (
        gauge(
            "rayzero_goodput_ratio",
            "ratio",
            "Share of the time since this run began that was spent in steps that count.",
            lambda r: r.job.time_breakdown(r.now).goodput,
        ),
        counter(
            "rayzero_time_seconds_total",
            "seconds",
            "Wall time by cause; `productive` is goodput, the others are lost time.",
            lambda r: {
                str(why): spent for why, spent in r.job.time_breakdown(r.now).seconds.items()
            },
            "cause",
        ),
        gauge(
            "rayzero_time_unattributed_seconds",
            "seconds",
            "Time not attributed to a cause yet: the step or the recovery in progress.",
            lambda r: r.job.time_breakdown(r.now).unattributed_s,
        ),
    ),
}
