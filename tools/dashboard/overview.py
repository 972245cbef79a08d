"""Panels of the overview, about speed, and about memory."""

from __future__ import annotations

from tools.dashboard.panels import (
    JOB_SELECTOR,
    RANK_SELECTOR,
    DashboardRow,
    Panel,
    Query,
    age_query,
    gauge_query,
    mean_query,
    quantile_query,
    rate_query,
)

HIGH_IS_GOOD = ((None, "red"), (0.8, "orange"), (0.95, "green"))


HIGH_IS_BAD = ((None, "green"), (1.0, "orange"), (5.0, "red"))

OVERVIEW_ROW = DashboardRow(
    "Overview",
    (
        Panel(
            "State",
            "Current state of the job.",
            "none",
            (Query(f"rayzero_state{{{JOB_SELECTOR}}} == 1", "{{state}}"),),
            kind="stat",
            show_names=True,
            width=4,
            height=4,
        ),
        Panel(
            "Progress",
            "Finished steps, as a share of the target.",
            "percentunit",
            (
                Query(
                    f"rayzero_step{{{JOB_SELECTOR}}} / rayzero_target_steps{{{JOB_SELECTOR}}}",
                    "done",
                ),
            ),
            kind="gauge",
            maximum=1,
            width=4,
            height=4,
        ),
        Panel(
            "Time left",
            "Estimated from the recent step time.",
            "s",
            (gauge_query("rayzero_remaining_seconds", "left"),),
            kind="stat",
            width=4,
            height=4,
        ),
        Panel(
            "Goodput",
            "Share of this run's wall time spent in steps that were not lost.",
            "percentunit",
            (gauge_query("rayzero_goodput_ratio", "goodput"),),
            kind="stat",
            thresholds=HIGH_IS_GOOD,
            width=4,
            height=4,
        ),
        Panel(
            "Ranks",
            "Ranks of the current generation, and its number.",
            "none",
            (
                gauge_query("rayzero_world_size", "ranks"),
                gauge_query("rayzero_generation", "generation"),
            ),
            kind="stat",
            width=4,
            height=4,
        ),
        Panel(
            "Faults in this run",
            "Recorded faults of every cause.",
            "none",
            (Query(f"sum(rayzero_faults_total{{{JOB_SELECTOR}}}) or vector(0)", "faults"),),
            kind="stat",
            thresholds=HIGH_IS_BAD,
            width=4,
            height=4,
        ),
        Panel(
            "Loss",
            "Loss of the last step, over the global batch.",
            "none",
            (gauge_query("rayzero_loss", "loss"),),
        ),
        Panel(
            "Learning rate and gradient norm",
            "Learning rate of the first parameter group; L2 norm of the gradients before clipping.",
            "none",
            (
                gauge_query("rayzero_gradient_norm", "gradient norm"),
                gauge_query("rayzero_learning_rate", "learning rate", axis="right"),
            ),
        ),
        Panel(
            "User metrics",
            "Values passed to `ctx.report`, the mean over ranks. Empty if there are none.",
            "none",
            (
                gauge_query("rayzero_user_value", "{{name}}"),
                gauge_query("rayzero_user_metrics_dropped_total", "dropped", axis="right"),
            ),
        ),
        Panel(
            "Wall time by cause",
            "All but `productive` is lost time.",
            "percentunit",
            (
                Query(
                    f"rate(rayzero_time_seconds_total{{{JOB_SELECTOR}}}[$__rate_interval])",
                    "{{cause}}",
                ),
                gauge_query("rayzero_time_unattributed_seconds", "unattributed (s)", axis="right"),
            ),
            stacked=True,
            maximum=1,
        ),
        Panel(
            "Workers",
            "Current ranks between the job's limits.",
            "none",
            (
                gauge_query("rayzero_world_size", "ranks"),
                gauge_query("rayzero_workers", "{{limit}}"),
            ),
        ),
        Panel(
            "Steps",
            "Finished steps in the current training state. It falls when steps are lost.",
            "none",
            (gauge_query("rayzero_step", "step"), gauge_query("rayzero_target_steps", "target")),
        ),
        Panel(
            "Durations",
            "Age of this run and of its current state, and time since the last step.",
            "s",
            (
                age_query("rayzero_start_timestamp_seconds", "this run"),
                age_query("rayzero_state_timestamp_seconds", "this state"),
                age_query("rayzero_last_step_timestamp_seconds", "since the last step"),
            ),
            kind="stat",
            width=5,
        ),
        Panel(
            "Version",
            "Version and ZeRO stage.",
            "none",
            (gauge_query("rayzero_info", "rayzero {{version}}, stage {{stage}}"),),
            kind="stat",
            show_names=True,
            width=3,
        ),
    ),
)

SPEED_ROW = DashboardRow(
    "Speed",
    (
        Panel(
            "Step time",
            "Duration of a step on its slowest rank.",
            "s",
            (
                mean_query("rayzero_step_seconds", "mean"),
                quantile_query("rayzero_step_seconds", 0.5, "median"),
                quantile_query("rayzero_step_seconds", 0.99, "99th percentile"),
            ),
        ),
        Panel(
            "Step time by phase",
            "Duration of a step's phases, the mean over ranks.",
            "s",
            (mean_query("rayzero_step_phase_seconds", "{{phase}}", by="phase"),),
            stacked=True,
        ),
        Panel(
            "Throughput",
            "Tokens, samples and steps per second.",
            "none",
            (
                rate_query("rayzero_tokens_total", "tokens/s"),
                Query(
                    f"rate(rayzero_samples_total{{{JOB_SELECTOR}}}[$__rate_interval])",
                    "samples/s",
                    "right",
                ),
                Query(
                    f"rate(rayzero_steps_total{{{JOB_SELECTOR}}}[$__rate_interval])",
                    "steps/s",
                    "right",
                ),
            ),
        ),
        Panel(
            "Model flops utilization",
            "Share of the devices' peak flops, the mean over ranks. Empty if the peak is unknown.",
            "percentunit",
            (gauge_query("rayzero_model_flops_utilization_ratio", "utilization"),),
        ),
        Panel(
            "Exposed communication",
            "Share of its time in which a rank waited for other ranks in collectives.",
            "percentunit",
            (
                rate_query(
                    "rayzero_exposed_communication_seconds_total", "rank {{rank}}", RANK_SELECTOR
                ),
            ),
        ),
        Panel(
            "Waiting for data",
            "Share of its time in which a rank waited for its data loader.",
            "percentunit",
            (rate_query("rayzero_data_wait_seconds_total", "rank {{rank}}", RANK_SELECTOR),),
            thresholds=((None, "green"), (0.05, "orange"), (0.2, "red")),
        ),
        Panel(
            "Bytes by collective",
            "Bytes per second, the sum over ranks.",
            "Bps",
            (rate_query("rayzero_communication_bytes_total", "{{collective}}"),),
            stacked=True,
        ),
        Panel(
            "Collective calls",
            "Calls per second, the sum over ranks.",
            "ops",
            (rate_query("rayzero_communication_calls_total", "{{collective}}"),),
        ),
        Panel(
            "Step time by rank",
            "Each rank's last step, and its own work in it. A straggler has the most own work.",
            "s",
            (
                gauge_query(
                    "rayzero_rank_compute_seconds", "rank {{rank}}: own work", RANK_SELECTOR
                ),
                gauge_query("rayzero_rank_step_seconds", "rank {{rank}}: step", RANK_SELECTOR),
            ),
        ),
        Panel(
            "CPU cores by rank",
            "CPU cores that a rank's process used, the mean over its last step.",
            "none",
            (gauge_query("rayzero_process_cpu_cores", "rank {{rank}}", RANK_SELECTOR),),
            width=12,
        ),
        Panel(
            "GPU utilization by rank",
            "Share of the last second in which a rank's GPU ran a kernel. Empty on CPUs.",
            "percentunit",
            (gauge_query("rayzero_device_utilization_ratio", "rank {{rank}}", RANK_SELECTOR),),
            width=12,
        ),
        Panel(
            "Silence of ranks",
            "Time since a rank's training thread made progress. At the limit it counts as hung.",
            "s",
            (
                gauge_query("rayzero_rank_silent_seconds", "rank {{rank}}", RANK_SELECTOR),
                gauge_query("rayzero_patience_seconds", "limit"),
            ),
            width=12,
        ),
        Panel(
            "Steps behind the first rank",
            "Difference between each rank's step and the highest one.",
            "none",
            (
                Query(
                    f"scalar(max(rayzero_rank_step{{{JOB_SELECTOR}}}))"
                    f" - rayzero_rank_step{{{RANK_SELECTOR}}}",
                    "rank {{rank}}",
                ),
            ),
            width=12,
        ),
    ),
)

MEMORY_ROW = DashboardRow(
    "Memory",
    (
        Panel(
            "Engine by class",
            "Memory that engines of the selected ranks hold between steps, the maximum over ranks.",
            "bytes",
            (Query(f"max by (class) (rayzero_memory_bytes{{{RANK_SELECTOR}}})", "{{class}}"),),
            stacked=True,
        ),
        Panel(
            "Device peak by rank",
            "Peak memory that torch has allocated on a rank's device. Empty on CPUs.",
            "bytes",
            (gauge_query("rayzero_device_peak_memory_bytes", "rank {{rank}}", RANK_SELECTOR),),
        ),
        Panel(
            "Resident memory by rank",
            "Resident memory of a rank's process.",
            "bytes",
            (gauge_query("rayzero_process_resident_memory_bytes", "rank {{rank}}", RANK_SELECTOR),),
        ),
    ),
)
