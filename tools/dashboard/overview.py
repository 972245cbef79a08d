"""What is on the dashboard: its rows and their panels."""

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
            "The state the job is in.",
            "none",
            (Query(f"rayzero_state{{{JOB_SELECTOR}}} == 1", "{{state}}"),),
            kind="stat",
            show_names=True,
            width=4,
            height=4,
        ),
        Panel(
            "Progress",
            "Finished steps, of those that the job asks for.",
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
            "At the pace of late.",
            "s",
            (gauge_query("rayzero_remaining_seconds", "left"),),
            kind="stat",
            width=4,
            height=4,
        ),
        Panel(
            "Goodput",
            "Seconds of steps that count, of all seconds since this run began.",
            "percentunit",
            (gauge_query("rayzero_goodput_ratio", "goodput"),),
            kind="stat",
            thresholds=HIGH_IS_GOOD,
            width=4,
            height=4,
        ),
        Panel(
            "Ranks",
            "Ranks of the newest generation, and that generation's number.",
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
            "Faults that were judged, of every cause.",
            "none",
            (Query(f"sum(rayzero_faults_total{{{JOB_SELECTOR}}}) or vector(0)", "faults"),),
            kind="stat",
            thresholds=HIGH_IS_BAD,
            width=4,
            height=4,
        ),
        Panel(
            "Loss",
            "Of the last step, over the global batch.",
            "none",
            (gauge_query("rayzero_loss", "loss"),),
        ),
        Panel(
            "Learning rate and gradient norm",
            "The first group's learning rate; the L2 norm of the gradient before clipping.",
            "none",
            (
                gauge_query("rayzero_gradient_norm", "gradient norm"),
                gauge_query("rayzero_learning_rate", "learning rate", axis="right"),
            ),
        ),
        Panel(
            "What the training function reports",
            "By `ctx.report`, the mean over ranks. Empty where it reports nothing of its own.",
            "none",
            (
                gauge_query("rayzero_user_value", "{{name}}"),
                gauge_query("rayzero_user_metrics_dropped_total", "left out", axis="right"),
            ),
        ),
        Panel(
            "Where the time goes",
            "Wall time by cause. All but `productive` is lost.",
            "percentunit",
            (
                Query(
                    f"rate(rayzero_time_seconds_total{{{JOB_SELECTOR}}}[$__rate_interval])",
                    "{{cause}}",
                ),
                gauge_query(
                    "rayzero_time_unattributed_seconds", "not booked yet (s)", axis="right"
                ),
            ),
            stacked=True,
            maximum=1,
        ),
        Panel(
            "Workers",
            "Ranks at work between the job's limits.",
            "none",
            (
                gauge_query("rayzero_world_size", "ranks"),
                gauge_query("rayzero_workers", "{{limit}}"),
            ),
        ),
        Panel(
            "Steps",
            "Finished steps in the job's state. It falls where steps are lost.",
            "none",
            (gauge_query("rayzero_step", "step"), gauge_query("rayzero_target_steps", "asked for")),
        ),
        Panel(
            "Since",
            "How long this run has lasted, its present state, and the step at hand.",
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
            "Made of",
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
            "A step on its slowest rank.",
            "s",
            (
                mean_query("rayzero_step_seconds", "mean"),
                quantile_query("rayzero_step_seconds", 0.5, "median"),
                quantile_query("rayzero_step_seconds", 0.99, "99th percentile"),
            ),
        ),
        Panel(
            "Step time by phase",
            "The parts of a step, the mean over ranks.",
            "s",
            (mean_query("rayzero_step_phase_seconds", "{{phase}}", by="phase"),),
            stacked=True,
        ),
        Panel(
            "Throughput",
            "Tokens and samples of finished steps a second.",
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
            "Of the devices' peak, the mean over ranks. Empty where that peak is not known.",
            "percentunit",
            (gauge_query("rayzero_model_flops_utilization_ratio", "utilization"),),
        ),
        Panel(
            "Exposed communication",
            "The share of its time in which a rank stood waiting for others in collectives.",
            "percentunit",
            (
                rate_query(
                    "rayzero_exposed_communication_seconds_total", "rank {{rank}}", RANK_SELECTOR
                ),
            ),
        ),
        Panel(
            "Waiting for data",
            "The share of its time in which a rank waited for its loader.",
            "percentunit",
            (rate_query("rayzero_data_wait_seconds_total", "rank {{rank}}", RANK_SELECTOR),),
            thresholds=((None, "green"), (0.05, "orange"), (0.2, "red")),
        ),
        Panel(
            "Bytes by collective",
            "Moved a second, over all ranks.",
            "Bps",
            (rate_query("rayzero_communication_bytes_total", "{{collective}}"),),
            stacked=True,
        ),
        Panel(
            "Collectives entered",
            "Calls a second, over all ranks.",
            "ops",
            (rate_query("rayzero_communication_calls_total", "{{collective}}"),),
        ),
        Panel(
            "Step time by rank",
            "Each rank's last step, and what of it was its own work. A straggler stands above.",
            "s",
            (
                gauge_query(
                    "rayzero_rank_compute_seconds", "rank {{rank}}: own work", RANK_SELECTOR
                ),
                gauge_query("rayzero_rank_step_seconds", "rank {{rank}}: step", RANK_SELECTOR),
            ),
        ),
        Panel(
            "Silence of ranks",
            "How long a rank's training thread has not moved. At the limit it counts as hung.",
            "s",
            (
                gauge_query("rayzero_rank_silent_seconds", "rank {{rank}}", RANK_SELECTOR),
                gauge_query("rayzero_hang_timeout_seconds", "limit"),
            ),
            width=12,
        ),
        Panel(
            "Steps behind the front",
            "How far each rank's step is behind the furthest one's.",
            "none",
            (
                Query(
                    f"scalar(max(rayzero_rank_step{{{JOB_SELECTOR}}})) - rayzero_rank_step{{{RANK_SELECTOR}}}",
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
            "What the engines of the chosen ranks hold between steps, the largest rank's.",
            "bytes",
            (Query(f"max by (class) (rayzero_memory_bytes{{{RANK_SELECTOR}}})", "{{class}}"),),
            stacked=True,
        ),
        Panel(
            "Device peak by rank",
            "The most that torch ever had allocated on a rank's device. Empty on CPUs.",
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
