"""Panels about faults, recoveries, replicas, non-finite values and checkpoints."""

from __future__ import annotations

from tools.dashboard.panels import (
    JOB_SELECTOR,
    DashboardRow,
    Panel,
    Query,
    age_query,
    gauge_query,
    increase_query,
    mean_query,
    quantile_query,
)

BUDGET_THRESHOLDS = ((None, "green"), (0.5, "orange"), (0.75, "red"))

FAULTS_ROW = DashboardRow(
    "Faults",
    (
        Panel(
            "Faults by cause",
            "Recorded faults of this run, by root cause.",
            "none",
            (gauge_query("rayzero_faults_total", "{{cause}}"),),
            stacked=True,
        ),
        Panel(
            "Repairs and resizes",
            "Faults that this run has recovered from, and changes of membership without a fault.",
            "none",
            (
                gauge_query("rayzero_repairs_total", "repairs: {{cause}}"),
                gauge_query("rayzero_resizes_total", "resizes"),
            ),
        ),
        Panel(
            "Fault budget",
            "Hardware faults in the window, as a share of the budget.",
            "percentunit",
            (
                Query(
                    f"rayzero_faults_in_window{{{JOB_SELECTOR}}}"
                    f" / rayzero_fault_budget{{{JOB_SELECTOR}}}",
                    "used",
                ),
            ),
            thresholds=BUDGET_THRESHOLDS,
            kind="gauge",
            maximum=1,
        ),
        Panel(
            "Recovery time",
            "From the first report of a fault to the next finished step, excluding that step.",
            "s",
            (
                mean_query("rayzero_recovery_seconds", "mean"),
                quantile_query("rayzero_recovery_seconds", 0.5, "median"),
                quantile_query("rayzero_recovery_seconds", 0.95, "95th percentile"),
            ),
        ),
        Panel(
            "Recovery time by phase",
            "Mean duration of the phases of a recovery.",
            "s",
            (mean_query("rayzero_recovery_phase_seconds", "{{phase}}", by="phase"),),
            stacked=True,
        ),
        Panel(
            "Steps redone",
            "Finished steps that were lost and repeated.",
            "none",
            (increase_query("rayzero_steps_redone_total", "steps"),),
        ),
        Panel(
            "Cost of a lost worker or node",
            "Steps and seconds of training since the latest replica on the worker's own node (lost "
            "with a worker), and since the latest on other nodes (lost with a node).",
            "none",
            (
                Query(
                    f"rayzero_step{{{JOB_SELECTOR}}} - ignoring (place) group_right ()"
                    f" rayzero_replica_step{{{JOB_SELECTOR}}}",
                    "steps: {{place}}",
                ),
                Query(
                    f"rayzero_last_step_timestamp_seconds{{{JOB_SELECTOR}}}"
                    " - ignoring (place) group_right ()"
                    f" rayzero_replica_unprotected_since_timestamp_seconds{{{JOB_SELECTOR}}}",
                    "seconds: {{place}}",
                    "right",
                ),
            ),
        ),
        Panel(
            "Age of replicas",
            "Time since the latest replicated step finished.",
            "s",
            (age_query("rayzero_replica_timestamp_seconds", "{{place}}"),),
        ),
        Panel(
            "Replicas",
            "Bytes of local replicas in vaults, and of the latest step's replicas on other nodes.",
            "bytes",
            (gauge_query("rayzero_replica_bytes", "{{place}}"),),
        ),
        Panel(
            "Non-finite values and bad samples",
            "Steps that were skipped because a gradient was not finite, losses of inf or nan, "
            "samples that were left out since the job began, and the loss scale.",
            "none",
            (
                increase_query("rayzero_skipped_steps_total", "skipped steps"),
                increase_query("rayzero_nonfinite_losses_total", "losses not finite"),
                gauge_query("rayzero_bad_samples", "bad samples"),
                gauge_query("rayzero_loss_scale", "loss scale", axis="right"),
            ),
        ),
    ),
)

CHECKPOINTS_ROW = DashboardRow(
    "Checkpoints",
    (
        Panel(
            "Latest checkpoint",
            "Its age; without one, the time since the first step.",
            "s",
            (
                age_query("rayzero_checkpoint_timestamp_seconds", "age"),
                age_query(
                    "rayzero_checkpoint_unprotected_since_timestamp_seconds", "unprotected for"
                ),
            ),
            kind="stat",
            thresholds=((None, "green"), (3600, "orange"), (7200, "red")),
            width=6,
        ),
        Panel(
            "Cost of losing the whole cluster",
            "Steps since the latest checkpoint.",
            "none",
            (
                Query(
                    f"rayzero_step{{{JOB_SELECTOR}}} - rayzero_checkpoint_step{{{JOB_SELECTOR}}}",
                    "steps",
                ),
            ),
            width=6,
        ),
        Panel(
            "Written and failed",
            "Checkpoints written, and failed attempts.",
            "none",
            (
                increase_query("rayzero_checkpoints_total", "written"),
                increase_query("rayzero_checkpoint_failures_total", "failed"),
            ),
            width=6,
        ),
        Panel(
            "Size",
            "Size of the latest checkpoint.",
            "bytes",
            (gauge_query("rayzero_checkpoint_bytes", "bytes"),),
            width=6,
        ),
        Panel(
            "Time to write",
            "From the pinned step to the committed manifest, in the background.",
            "s",
            (
                mean_query("rayzero_checkpoint_seconds", "mean"),
                quantile_query("rayzero_checkpoint_seconds", 0.95, "95th percentile"),
            ),
            width=12,
        ),
        Panel(
            "Training stall",
            "Time that training was stopped for a checkpoint, on the slowest rank.",
            "s",
            (
                mean_query("rayzero_checkpoint_stall_seconds", "mean"),
                quantile_query("rayzero_checkpoint_stall_seconds", 0.95, "95th percentile"),
            ),
            width=12,
        ),
    ),
)
