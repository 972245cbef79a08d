"""Every series.

Every series of a job's /metrics, as rows of data. `docs/metrics.md` is made from it.

Names follow the Prometheus conventions: base units, `_total` on counters, a time as Unix seconds
under `_timestamp_seconds`. Every series has the label `job`, so a scrape has to honour labels. One
with `rank` has a row for each rank of the newest generation, and loses it with the rank.

The catalog's series of what outlives a step: faults, replicas, checkpoints, where time went.
"""

from __future__ import annotations

from collections.abc import Mapping

from rayzero.orchestrator.metrics.primitives import (
    CHECKPOINT_BUCKETS_S,
    RECOVERY_BUCKETS_S,
    STEP_BUCKETS_S,
    Series,
)

RESILIENCE_GROUPS: Mapping[str, tuple[Series, ...]] = {
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
            buckets=RECOVERY_BUCKETS_S,
        ),
        Series(
            "rayzero_recovery_phase_seconds",
            "histogram",
            "seconds",
            "The parts of that.",
            ("phase",),
            RECOVERY_BUCKETS_S,
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

CATALOG_GROUPS: Mapping[str, tuple[Series, ...]] = {
    "The job": (
        Series("rayzero_info", "gauge", "", "1; what the job is made of.", ("version", "stage")),
        Series("rayzero_state", "gauge", "", "1 for the state it is in, 0 for others.", ("state",)),
        Series("rayzero_state_timestamp_seconds", "gauge", "seconds", "When it entered its state."),
        Series("rayzero_start_timestamp_seconds", "gauge", "seconds", "When this run began."),
        Series("rayzero_world_size", "gauge", "ranks", "Ranks of the newest generation."),
        Series("rayzero_generation", "gauge", "", "Number of the newest process group."),
        Series("rayzero_workers", "gauge", "workers", "The job's limits.", ("limit",)),
    ),
    "Progress": (
        Series("rayzero_step", "gauge", "steps", "Finished steps in the job's state."),
        Series("rayzero_target_steps", "gauge", "steps", "Steps the job asks for."),
        Series("rayzero_steps_total", "counter", "steps", "Steps finished by this run."),
        Series(
            "rayzero_last_step_timestamp_seconds", "gauge", "seconds", "When a step was finished."
        ),
        Series("rayzero_remaining_seconds", "gauge", "seconds", "Time left at the pace of late."),
        Series("rayzero_tokens_total", "counter", "tokens", "Tokens in finished steps."),
        Series("rayzero_samples_total", "counter", "samples", "Samples in finished steps."),
    ),
    "Training": (
        Series("rayzero_loss", "gauge", "", "Loss of the last step, over the global batch."),
        Series(
            "rayzero_nonfinite_losses_total", "counter", "steps", "Steps with a loss of inf or nan."
        ),
        Series("rayzero_learning_rate", "gauge", "", "The first group's, in the last step."),
        Series("rayzero_gradient_norm", "gauge", "", "L2 norm in the last step, before clipping."),
        Series("rayzero_loss_scale", "gauge", "", "What the next loss is multiplied by."),
        Series(
            "rayzero_skipped_steps_total",
            "counter",
            "steps",
            "Steps whose gradient was not finite.",
        ),
        Series(
            "rayzero_user_value",
            "gauge",
            "",
            "What the training function reports by `ctx.report`: the mean over ranks, when last "
            "reported.",
            ("name",),
        ),
        Series(
            "rayzero_user_values_left_out_total",
            "counter",
            "values",
            "Values that were reported under more names than are told.",
        ),
    ),
    "Speed": (
        Series(
            "rayzero_step_seconds",
            "histogram",
            "seconds",
            "A step on its slowest rank.",
            buckets=STEP_BUCKETS_S,
        ),
        Series(
            "rayzero_step_phase_seconds",
            "histogram",
            "seconds",
            "A step's parts, the mean over ranks; together the step.",
            ("phase",),
            STEP_BUCKETS_S,
        ),
        Series(
            "rayzero_model_flops_utilization_ratio",
            "gauge",
            "ratio",
            "Of the devices' peak, the mean over ranks, in the last step.",
        ),
        Series(
            "rayzero_exposed_communication_seconds_total",
            "counter",
            "seconds",
            "How long a rank stood waiting for others in collectives.",
            ("rank",),
        ),
        Series(
            "rayzero_communication_bytes_total",
            "counter",
            "bytes",
            "Moved by collectives, over all ranks.",
            ("collective",),
        ),
        Series(
            "rayzero_communication_calls_total",
            "counter",
            "calls",
            "Collectives entered, over all ranks.",
            ("collective",),
        ),
        Series(
            "rayzero_data_wait_seconds_total",
            "counter",
            "seconds",
            "How long a rank waited for its loader.",
            ("rank",),
        ),
    ),
    "Ranks": (
        Series("rayzero_rank_step", "gauge", "steps", "The step a rank works on.", ("rank",)),
        Series("rayzero_rank_step_seconds", "gauge", "seconds", "Its last step.", ("rank",)),
        Series(
            "rayzero_rank_compute_seconds",
            "gauge",
            "seconds",
            "Its last step without waits for other ranks.",
            ("rank",),
        ),
        Series(
            "rayzero_rank_silent_seconds",
            "gauge",
            "seconds",
            "How long its training thread has not moved, as of its last heartbeat.",
            ("rank",),
        ),
        Series(
            "rayzero_hang_timeout_seconds", "gauge", "seconds", "Silence that makes a rank hung."
        ),
    ),
    "Memory": (
        Series(
            "rayzero_memory_bytes",
            "gauge",
            "bytes",
            "What a rank's engine holds between steps, by class.",
            ("rank", "class"),
        ),
        Series(
            "rayzero_process_resident_memory_bytes",
            "gauge",
            "bytes",
            "Resident memory of a rank's process.",
            ("rank",),
        ),
        Series(
            "rayzero_device_peak_memory_bytes",
            "gauge",
            "bytes",
            "The most that torch ever had allocated on a rank's device.",
            ("rank",),
        ),
    ),
    **RESILIENCE_GROUPS,
}

CATALOG: Mapping[str, Series] = {one.name: one for rows in CATALOG_GROUPS.values() for one in rows}
