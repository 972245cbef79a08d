"""Metrics of the job, its progress, speed, ranks and memory."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from rayzero.orchestrator.machine import State
from rayzero.orchestrator.metrics.rank_metrics import RankMetrics, RankMetricsTable
from rayzero.orchestrator.metrics.series import (
    JobReading,
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


def _info(r: JobReading) -> Mapping[tuple[str, ...], float]:
    stage = r.job.info.stage
    return {(version("rayzero"), "" if stage is None else str(stage)): 1}


def _traffic(what: str, ranks: RankMetricsTable) -> Mapping[str, float]:
    totals = sorted(ranks.traffic().items())
    return {collective: amount for (kind, collective), amount in totals if kind == what}


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
        gauge("rayzero_info", "", "Always 1; version and ZeRO stage.", _info, "version", "stage"),
        gauge(
            "rayzero_state",
            "",
            "1 for the job's current state, 0 for the others.",
            lambda r: {str(state): float(state is r.job.state) for state in State},
            "state",
        ),
        gauge(
            "rayzero_state_timestamp_seconds",
            "seconds",
            "When the job entered its current state.",
            lambda r: r.job.state_since.unix_s,
        ),
        gauge(
            "rayzero_start_timestamp_seconds",
            "seconds",
            "When this run began.",
            lambda r: r.job.started.unix_s,
        ),
        gauge(
            "rayzero_world_size",
            "ranks",
            "Ranks of the newest generation.",
            lambda r: r.job.world_size,
        ),
        gauge(
            "rayzero_generation",
            "",
            "Number of the newest generation (process group).",
            lambda r: r.job.generation,
        ),
        gauge(
            "rayzero_workers",
            "workers",
            "Minimum and maximum number of workers.",
            lambda r: dict(zip(("min", "max"), r.job.worker_limits, strict=True)),
            "limit",
        ),
    ),
    "Progress": (
        gauge(
            "rayzero_step",
            "steps",
            "Finished steps in the current training state.",
            lambda r: r.job.steps.step,
        ),
        gauge(
            "rayzero_target_steps",
            "steps",
            "Steps that the job is configured to train.",
            lambda r: r.job.info.target_steps,
        ),
        counter(
            "rayzero_steps_total",
            "steps",
            "Steps finished by this run.",
            lambda r: r.job.steps.done,
            journal_field="done",
        ),
        gauge(
            "rayzero_last_step_timestamp_seconds",
            "seconds",
            "When the last step finished.",
            lambda r: r.job.steps.last_at_unix_s,
        ),
        gauge(
            "rayzero_remaining_seconds",
            "seconds",
            "Estimated time left, at the recent step time.",
            lambda r: r.job.steps.remaining_s(r.job.info.target_steps),
        ),
        counter(
            "rayzero_tokens_total",
            "tokens",
            "Tokens in finished steps.",
            lambda r: r.job.steps.tokens,
            journal_field="tokens",
        ),
        counter(
            "rayzero_samples_total",
            "samples",
            "Samples in finished steps.",
            lambda r: r.job.steps.samples,
            journal_field="samples",
        ),
    ),
    "Training": (
        gauge(
            "rayzero_loss",
            "",
            "Loss of the last step, over the global batch.",
            lambda r: r.job.steps.last_record.loss if r.job.steps.last_record else None,
        ),
        counter(
            "rayzero_nonfinite_losses_total",
            "steps",
            "Steps whose loss was inf or nan.",
            lambda r: r.job.steps.nonfinite,
            journal_field="nonfinite",
        ),
        step_gauge(
            "rayzero_learning_rate",
            "",
            "Learning rate of the first parameter group, in the last step.",
            "lr",
        ),
        step_gauge(
            "rayzero_gradient_norm",
            "",
            "L2 norm of the gradients before clipping, in the last step.",
            "grad_norm",
        ),
        step_gauge("rayzero_loss_scale", "", "Loss scale after the last step.", "loss_scale"),
        counter(
            "rayzero_skipped_steps_total",
            "steps",
            "Steps that were skipped because a gradient was not finite.",
            lambda r: r.job.steps.skipped,
            journal_field="skipped",
        ),
        gauge(
            "rayzero_user_value",
            "",
            "Last value that the training function passed to `ctx.report`, the mean over ranks.",
            lambda r: dict(sorted(r.job.user_metrics.values.items())),
            "name",
        ),
        counter(
            "rayzero_user_metrics_dropped_total",
            "values",
            "Values that are not exported because there are too many names.",
            lambda r: r.job.user_metrics.dropped,
        ),
    ),
    "Speed": (
        histogram(
            "rayzero_step_seconds",
            "Duration of a step on its slowest rank.",
            lambda r: r.job.steps.step_time,
        ),
        histogram(
            "rayzero_step_phase_seconds",
            "Duration of a step's phases, the mean over ranks; together they are the step.",
            lambda r: dict(sorted(r.job.steps.phase_times.items())),
            "phase",
        ),
        step_gauge(
            "rayzero_model_flops_utilization_ratio",
            "ratio",
            "Share of the devices' peak flops, the mean over ranks, in the last step.",
            "mfu",
        ),
        rank_series(
            "rayzero_exposed_communication_seconds_total",
            "counter",
            "seconds",
            "Time that a rank waited for other ranks in collectives.",
            lambda rank: None if rank.gauge("exposed_comm_s") is None else rank.exposed_comm_s,
            "exposed_comm_s",
        ),
        RankSeries(
            "rayzero_communication_bytes_total",
            "counter",
            "bytes",
            "Bytes moved by collectives, the sum over ranks.",
            lambda ranks: _traffic("bytes", ranks),
            ("collective",),
        ),
        RankSeries(
            "rayzero_communication_calls_total",
            "counter",
            "calls",
            "Collective calls, the sum over ranks.",
            lambda ranks: _traffic("calls", ranks),
            ("collective",),
        ),
        rank_series(
            "rayzero_data_wait_seconds_total",
            "counter",
            "seconds",
            "Time that a rank waited for its data loader.",
            lambda rank: None if rank.gauge("phases/data") is None else rank.data_wait_s,
        ),
    ),
    "Ranks": (
        rank_series(
            "rayzero_rank_step",
            "gauge",
            "steps",
            "The step that a rank is working on.",
            lambda rank: rank.beat.step if rank.beat else None,
        ),
        rank_gauge("rayzero_rank_step_seconds", "seconds", "Duration of its last step.", "step_s"),
        rank_series(
            "rayzero_rank_compute_seconds",
            "gauge",
            "seconds",
            "Duration of its last step without the time that it waited for other ranks.",
            _compute_s,
        ),
        rank_series(
            "rayzero_rank_silent_seconds",
            "gauge",
            "seconds",
            "Time since its training thread last made progress, as of its last heartbeat.",
            lambda rank: rank.beat.silent_s if rank.beat else None,
        ),
        gauge(
            "rayzero_hang_timeout_seconds",
            "seconds",
            "Time without progress after which a rank counts as hung.",
            lambda r: r.job.info.hang_timeout_s,
        ),
    ),
    "Memory": (
        RankSeries(
            "rayzero_memory_bytes",
            "gauge",
            "bytes",
            "Memory that a rank's engine holds between steps, by class.",
            _memory,
            ("rank", "class"),
        ),
        rank_gauge(
            "rayzero_process_resident_memory_bytes",
            "bytes",
            "Resident memory of a rank's process.",
            "resident_bytes",
        ),
        rank_gauge(
            "rayzero_device_peak_memory_bytes",
            "bytes",
            "Peak memory that torch has allocated on a rank's device.",
            "device_peak_bytes",
        ),
    ),
}
