"""What is on the dashboard of faults, numbers out of range, and checkpoints."""

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
            "Faults that were judged, in this run so far.",
            "none",
            (gauge_query("rayzero_faults_total", "{{cause}}"),),
            stacked=True,
        ),
        Panel(
            "Repairs and resizes",
            "Faults the job is past, and changes of membership by wish, in this run so far.",
            "none",
            (
                gauge_query("rayzero_repairs_total", "repairs: {{cause}}"),
                gauge_query("rayzero_resizes_total", "resizes"),
            ),
        ),
        Panel(
            "Fault budget",
            "Hardware faults in the window, of those that are allowed.",
            "percentunit",
            (
                Query(
                    f"rayzero_faults_in_window{{{JOB_SELECTOR}}} / rayzero_fault_budget{{{JOB_SELECTOR}}}",
                    "spent",
                ),
            ),
            thresholds=BUDGET_THRESHOLDS,
            kind="gauge",
            maximum=1,
        ),
        Panel(
            "Recovery time",
            "From a fault's first sign to the next finished step, without that step.",
            "s",
            (
                mean_query("rayzero_recovery_seconds", "mean"),
                quantile_query("rayzero_recovery_seconds", 0.5, "median"),
                quantile_query("rayzero_recovery_seconds", 0.95, "95th percentile"),
            ),
        ),
        Panel(
            "Recovery time by phase",
            "The parts of that, on the mean.",
            "s",
            (mean_query("rayzero_recovery_phase_seconds", "{{phase}}", by="phase"),),
            stacked=True,
        ),
        Panel(
            "Steps redone",
            "Finished steps that were gone back behind.",
            "none",
            (increase_query("rayzero_steps_redone_total", "steps"),),
        ),
        Panel(
            "What a lost worker or node would cost",
            "Steps and seconds of training that are in no replica on the worker's own node (a lost "
            "worker costs those), and in none on other nodes (a lost node).",
            "none",
            (
                Query(
                    f"rayzero_step{{{JOB_SELECTOR}}} - ignoring (place) group_right ()"
                    f" rayzero_replica_step{{{JOB_SELECTOR}}}",
                    "steps: {{place}}",
                ),
                Query(
                    f"rayzero_last_step_timestamp_seconds{{{JOB_SELECTOR}}} - ignoring (place)"
                    f" group_right () rayzero_replica_unprotected_since_timestamp_seconds{{{JOB_SELECTOR}}}",
                    "seconds: {{place}}",
                    "right",
                ),
            ),
        ),
        Panel(
            "Age of replicas",
            "How long ago the newest step was finished that lies in vaults.",
            "s",
            (age_query("rayzero_replica_timestamp_seconds", "{{place}}"),),
        ),
        Panel(
            "Replicas",
            "What vaults hold of their own nodes' ranks, and what the newest step took on others.",
            "bytes",
            (gauge_query("rayzero_replica_bytes", "{{place}}"),),
        ),
        Panel(
            "Numbers out of range",
            "Steps that were skipped because a gradient was not finite, losses of inf or nan, and "
            "the loss scale.",
            "none",
            (
                increase_query("rayzero_skipped_steps_total", "skipped steps"),
                increase_query("rayzero_nonfinite_losses_total", "losses not finite"),
                gauge_query("rayzero_loss_scale", "loss scale", axis="right"),
            ),
        ),
    ),
)

CHECKPOINTS_ROW = DashboardRow(
    "Checkpoints",
    (
        Panel(
            "Newest checkpoint",
            "Its age; before there is one, the time since the first step.",
            "s",
            (
                age_query("rayzero_checkpoint_timestamp_seconds", "age"),
                age_query("rayzero_checkpoint_unprotected_since_timestamp_seconds", "owed for"),
            ),
            kind="stat",
            thresholds=((None, "green"), (3600, "orange"), (7200, "red")),
            width=6,
        ),
        Panel(
            "What the loss of everything would cost",
            "Steps since the newest checkpoint.",
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
            "Checkpoints written, and tries that failed.",
            "none",
            (
                increase_query("rayzero_checkpoints_total", "written"),
                increase_query("rayzero_checkpoint_failures_total", "failed tries"),
            ),
            width=6,
        ),
        Panel(
            "Size",
            "Of the newest one.",
            "bytes",
            (gauge_query("rayzero_checkpoint_bytes", "bytes"),),
            width=6,
        ),
        Panel(
            "Time to write",
            "From the pinned step to the manifest, behind training.",
            "s",
            (
                mean_query("rayzero_checkpoint_seconds", "mean"),
                quantile_query("rayzero_checkpoint_seconds", 0.95, "95th percentile"),
            ),
            width=12,
        ),
        Panel(
            "Training stood still",
            "For one checkpoint, on the slowest rank.",
            "s",
            (
                mean_query("rayzero_checkpoint_stall_seconds", "mean"),
                quantile_query("rayzero_checkpoint_stall_seconds", 0.95, "95th percentile"),
            ),
            width=12,
        ),
    ),
)
