"""Metrics of the job, its progress, speed, ranks and memory."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from rayzero.orchestrator.machine import State
from rayzero.orchestrator.metrics.job_metrics import JobMetrics
from rayzero.orchestrator.metrics.rank_metrics import TRAFFIC_PREFIX, RankMetrics, RankMetricsTable
from rayzero.orchestrator.metrics.series import (
    JobSeries,
    RankSeries,
    counter,
    gauge,
    histogram,
    rank_gauge,
    rank_series,
    step_gauge,
)

_MEMORY_PREFIX = "bytes/"


def _info(job: JobMetrics) -> Mapping[tuple[str, ...], float]:
    return {(version("rayzero"), "" if job.stage is None else str(job.stage)): 1}


def _traffic(unit: str, ranks: RankMetricsTable) -> Mapping[str, float]:
    """The traffic of each collective, by its name. `unit`: "bytes" or "calls"."""
    return {
        name.removeprefix(TRAFFIC_PREFIX).removesuffix(f"/{unit}"): amount
        for name, amount in sorted(ranks.traffic().items())
        if name.endswith(f"/{unit}")
    }


def _compute_s(rank: RankMetrics) -> float | None:
    step_s, exposed_s = rank.gauge("step_s"), rank.gauge("exposed_comm_s")
    return None if step_s is None or exposed_s is None else step_s - exposed_s


def _memory(ranks: RankMetricsTable) -> Mapping[tuple[str, ...], float]:
    return {
        (str(rank), name.removeprefix(_MEMORY_PREFIX)): nbytes
        for rank, metrics in ranks.by_rank.items()
        if metrics.report is not None
        for name, nbytes in sorted(metrics.report.gauges.items())
        if name.startswith(_MEMORY_PREFIX)
    }


TRAINING_GROUPS: Mapping[str, tuple[JobSeries | RankSeries, ...]] = {
    "The job": (
        gauge("rayzero_info", "Always 1; version and ZeRO stage.", _info, "version", "stage"),
        gauge(
            "rayzero_state",
            "1 for the job's current state, 0 for the others.",
            lambda job: {str(state): float(state is job.facts.state) for state in State},
            "state",
        ),
        gauge(
            "rayzero_state_timestamp_seconds",
            "When the job entered its current state.",
            lambda job: job.state_since.unix_s,
        ),
        gauge(
            "rayzero_start_timestamp_seconds",
            "When this run began.",
            lambda job: job.facts.began_at_s,
        ),
        gauge(
            "rayzero_world_size",
            "Ranks of the newest generation.",
            lambda job: job.facts.world_size,
        ),
        gauge(
            "rayzero_generation",
            "Number of the newest generation (process group).",
            lambda job: job.facts.generation,
        ),
        gauge(
            "rayzero_workers",
            "Minimum and maximum number of workers.",
            lambda job: job.worker_limits,
            "limit",
        ),
    ),
    "Progress": (
        gauge(
            "rayzero_step",
            "Finished steps in the current training state.",
            lambda job: job.facts.step,
        ),
        gauge(
            "rayzero_target_steps",
            "Steps that the job is configured to train.",
            lambda job: job.spec.steps,
        ),
        counter(
            "rayzero_steps_total",
            "Steps finished by this run.",
            lambda job: job.facts.counters.done,
        ),
        gauge(
            "rayzero_last_step_timestamp_seconds",
            "When the last step finished.",
            lambda job: job.steps.last_at_unix_s,
        ),
        gauge(
            "rayzero_remaining_seconds",
            "Estimated time left, at the recent step time.",
            lambda job: job.remaining_s,
        ),
        counter(
            "rayzero_tokens_total",
            "Tokens in finished steps.",
            lambda job: job.facts.counters.tokens,
        ),
        counter(
            "rayzero_samples_total",
            "Samples in finished steps.",
            lambda job: job.facts.counters.samples,
        ),
    ),
    "Training": (
        gauge(
            "rayzero_loss",
            "Loss of the last step, over the global batch.",
            lambda job: job.steps.last_record.loss if job.steps.last_record else None,
        ),
        counter(
            "rayzero_nonfinite_losses_total",
            "Steps whose loss was inf or nan.",
            lambda job: job.facts.counters.nonfinite,
        ),
        step_gauge(
            "rayzero_learning_rate",
            "Learning rate of the first parameter group, in the last step.",
            "lr",
        ),
        step_gauge(
            "rayzero_gradient_norm",
            "L2 norm of the gradients before clipping, in the last step.",
            "grad_norm",
        ),
        step_gauge("rayzero_loss_scale", "Loss scale after the last step.", "loss_scale"),
        counter(
            "rayzero_skipped_steps_total",
            "Steps that were skipped because a gradient was not finite.",
            lambda job: job.facts.counters.skipped,
        ),
        gauge(
            "rayzero_user_value",
            "Last value that the training function passed to `ctx.report`, the mean over ranks.",
            lambda job: dict(sorted(job.steps.user_values.items())),
            "name",
        ),
        counter(
            "rayzero_user_metrics_dropped_total",
            "Values that are not exported because there are too many names.",
            lambda job: job.steps.user_values_dropped,
        ),
    ),
    "Speed": (
        histogram(
            "rayzero_step_seconds",
            "Duration of a step on its slowest rank.",
            lambda job: job.steps.step_time,
        ),
        histogram(
            "rayzero_step_phase_seconds",
            "Duration of a step's phases, the mean over ranks; together they are the step.",
            lambda job: dict(sorted(job.steps.phase_times.items())),
            "phase",
        ),
        step_gauge(
            "rayzero_model_flops_utilization_ratio",
            "Share of the devices' peak flops, the mean over ranks, in the last step.",
            "mfu",
        ),
        rank_series(
            "rayzero_exposed_communication_seconds_total",
            "counter",
            "Time that a rank waited for other ranks in collectives.",
            lambda rank: None if rank.gauge("exposed_comm_s") is None else rank.exposed_comm_s,
        ),
        RankSeries(
            "rayzero_communication_bytes_total",
            "counter",
            "Bytes moved by collectives, the sum over ranks.",
            lambda ranks: _traffic("bytes", ranks),
            ("collective",),
        ),
        RankSeries(
            "rayzero_communication_calls_total",
            "counter",
            "Collective calls, the sum over ranks.",
            lambda ranks: _traffic("calls", ranks),
            ("collective",),
        ),
        rank_series(
            "rayzero_data_wait_seconds_total",
            "counter",
            "Time that a rank waited for its data loader.",
            lambda rank: None if rank.gauge("phases/data") is None else rank.data_wait_s,
        ),
    ),
    "Ranks": (
        rank_series(
            "rayzero_rank_step",
            "gauge",
            "The step that a rank is working on.",
            lambda rank: rank.beat.step if rank.beat else None,
        ),
        rank_gauge("rayzero_rank_step_seconds", "Duration of its last step.", "step_s"),
        rank_series(
            "rayzero_rank_compute_seconds",
            "gauge",
            "Duration of its last step without the time that it waited for other ranks.",
            _compute_s,
        ),
        rank_series(
            "rayzero_rank_silent_seconds",
            "gauge",
            "Time since its training thread last made progress, as of its last heartbeat.",
            lambda rank: rank.beat.silent_s if rank.beat else None,
        ),
        rank_gauge(
            "rayzero_process_cpu_cores",
            "CPU cores that a rank's process used, the mean over its last step.",
            "cpu_cores",
        ),
        rank_gauge(
            "rayzero_device_utilization_ratio",
            "Share of the last second in which a rank's GPU ran a kernel, of any process.",
            "gpu_utilization",
        ),
        gauge(
            "rayzero_hang_timeout_seconds",
            "Time without progress after which a rank counts as hung.",
            lambda job: job.spec.recovery.hang_timeout_s,
        ),
    ),
    "Memory": (
        RankSeries(
            "rayzero_memory_bytes",
            "gauge",
            "Memory that a rank's engine holds between steps, by class.",
            _memory,
            ("rank", "class"),
        ),
        rank_gauge(
            "rayzero_process_resident_memory_bytes",
            "Resident memory of a rank's process.",
            "resident_bytes",
        ),
        rank_gauge(
            "rayzero_device_peak_memory_bytes",
            "Peak memory that torch has allocated on a rank's device.",
            "device_peak_bytes",
        ),
    ),
}
