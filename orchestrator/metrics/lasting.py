"""The catalog's series of what outlives a step: faults, replicas, checkpoints, where time went."""

from __future__ import annotations

from collections.abc import Mapping

from rayzero.orchestrator.metrics.series import (
    CHECKPOINT_BUCKETS_S,
    REPAIR_BUCKETS_S,
    STEP_BUCKETS_S,
    Series,
)

LASTING: Mapping[str, tuple[Series, ...]] = {
    "Faults": (
        Series("rayzero_faults_total", "counter", "faults", "Faults that were judged.", ("cause",)),
        Series(
            "rayzero_faults_in_window",
            "gauge",
            "faults",
            "Hardware faults that count against the budget now.",
        ),
        Series("rayzero_fault_budget", "gauge", "faults", "How many of those are allowed."),
        Series(
            "rayzero_repairs_total", "counter", "repairs", "Faults the job is past.", ("cause",)
        ),
        Series("rayzero_resizes_total", "counter", "resizes", "Changes of membership by wish."),
        Series(
            "rayzero_recovery_seconds",
            "histogram",
            "seconds",
            "From a fault's first sign to the next finished step, without that step.",
            buckets=REPAIR_BUCKETS_S,
        ),
        Series(
            "rayzero_recovery_phase_seconds",
            "histogram",
            "seconds",
            "The parts of that.",
            ("phase",),
            REPAIR_BUCKETS_S,
        ),
        Series(
            "rayzero_steps_redone_total", "counter", "steps", "Finished steps gone back behind."
        ),
        Series(
            "rayzero_replica_step",
            "gauge",
            "steps",
            "The newest step of which every rank's share lies there.",
            ("place",),
        ),
        Series(
            "rayzero_replica_timestamp_seconds",
            "gauge",
            "seconds",
            "When that step was finished.",
            ("place",),
        ),
        Series(
            "rayzero_replica_owed_timestamp_seconds",
            "gauge",
            "seconds",
            "The same; before there is one, when the first step was finished that was to be there.",
            ("place",),
        ),
        Series(
            "rayzero_replica_bytes",
            "gauge",
            "bytes",
            "What vaults hold of their own nodes' ranks, and what the newest step took on others.",
            ("place",),
        ),
    ),
    "Checkpoints": (
        Series("rayzero_checkpoints_total", "counter", "checkpoints", "Written by this run."),
        Series("rayzero_checkpoint_failures_total", "counter", "tries", "Tries that failed."),
        Series("rayzero_checkpoint_step", "gauge", "steps", "Step of the newest one."),
        Series(
            "rayzero_checkpoint_timestamp_seconds",
            "gauge",
            "seconds",
            "When it was durable, or was begun from.",
        ),
        Series(
            "rayzero_checkpoint_owed_timestamp_seconds",
            "gauge",
            "seconds",
            "The same; before there is one, when this run's first step was finished. For jobs that "
            "ask for checkpoints.",
        ),
        Series("rayzero_checkpoint_bytes", "gauge", "bytes", "Size of the newest one."),
        Series(
            "rayzero_checkpoint_seconds",
            "histogram",
            "seconds",
            "From the pinned step to the manifest, behind training.",
            buckets=CHECKPOINT_BUCKETS_S,
        ),
        Series(
            "rayzero_checkpoint_stop_seconds",
            "histogram",
            "seconds",
            "How long training stood still for one, on the slowest rank.",
            buckets=STEP_BUCKETS_S,
        ),
    ),
    "Goodput": (
        Series(
            "rayzero_goodput_ratio",
            "gauge",
            "ratio",
            "Seconds of steps that count, of all seconds since this run began.",
        ),
        Series(
            "rayzero_time_seconds_total",
            "counter",
            "seconds",
            "Where the time went; `productive` is goodput, every other cause is lost.",
            ("cause",),
        ),
        Series(
            "rayzero_time_pending_seconds",
            "gauge",
            "seconds",
            "Time since the last that is booked: the step, or the repair, under way.",
        ),
    ),
}
