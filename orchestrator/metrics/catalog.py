"""The catalog of all Prometheus metrics, and the functions that read it at a scrape.

A metric is one row: name, help, source of the value (a path of `JobMetrics` or a function), and
labels. `docs/metrics.md` is generated from the rows. Names follow the Prometheus conventions: base
units, `_total` on counters, times as Unix seconds under `_timestamp_seconds`. Every metric has the
label `job`, so scrapes must honor labels. Metrics with the label `rank` have one series for each
rank of the newest generation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from itertools import chain

from prometheus_client.core import Metric

from rayzero.orchestrator.machine import State
from rayzero.orchestrator.metrics.job_metrics import JobMetrics, StoredStep
from rayzero.orchestrator.metrics.rank_metrics import TRAFFIC_PREFIX, RankMetrics, RankView
from rayzero.orchestrator.metrics.role_metrics import ROLE_SERIES, ROLLOUT_SERIES
from rayzero.orchestrator.metrics.series import (
    JobSeries,
    RankSeries,
    Sample,
    Samples,
    counter,
    gauge,
    histogram,
    rank_gauge,
    rank_series,
    step_gauge,
)
from rayzero.orchestrator.metrics.stream_metrics import DATA_SERIES
from rayzero.orchestrator.policies.failure import FaultCause

_MEMORY_PREFIX = "bytes/"


def _info(job: JobMetrics) -> Mapping[tuple[str, ...], float]:
    return {(version("rayzero"), "" if job.stage is None else str(job.stage)): 1}


def _traffic(unit: str, ranks: RankView) -> Mapping[str, float]:
    """Returns the traffic of each collective, by its name. `unit` is "bytes" or "calls"."""
    return {
        name.removeprefix(TRAFFIC_PREFIX).removesuffix(f"/{unit}"): amount
        for name, amount in sorted(ranks.traffic.items())
        if name.endswith(f"/{unit}")
    }


def _compute_s(rank: RankMetrics) -> float | None:
    step_s, exposed_s = rank.gauge("step_s"), rank.gauge("exposed_comm_s")
    return None if step_s is None or exposed_s is None else step_s - exposed_s


def _memory(ranks: RankView) -> Mapping[tuple[str, ...], Sample]:
    return {
        (str(rank), name.removeprefix(_MEMORY_PREFIX)): nbytes
        for rank, metrics in ranks.rows
        if metrics.report is not None
        for name, nbytes in metrics.report.gauges(_MEMORY_PREFIX).items()
    }


def _replicas(read: Callable[[StoredStep], Sample]) -> Callable[[JobMetrics], Samples]:
    """Returns a reader of values by place: vaults of the ranks' own nodes, and of other nodes."""
    return lambda job: {place: read(stored) for place, stored in job.replicas.by_location.items()}


CATALOG_GROUPS: Mapping[str, tuple[JobSeries | RankSeries, ...]] = {
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
            "state_since.unix_s",
        ),
        gauge("rayzero_start_timestamp_seconds", "When this run began.", "facts.began_at_s"),
        gauge("rayzero_world_size", "Ranks of the newest generation.", "facts.world_size"),
        gauge(
            "rayzero_generation",
            "Number of the newest generation (process group).",
            "facts.generation",
        ),
        gauge(
            "rayzero_workers", "Minimum and maximum number of workers.", "worker_limits", "limit"
        ),
    ),
    "Progress": (
        gauge("rayzero_step", "Finished steps in the current training state.", "facts.step"),
        gauge("rayzero_target_steps", "Steps that the job is configured to train.", "spec.steps"),
        counter("rayzero_steps_total", "Steps finished by this run.", "facts.counters.done"),
        gauge(
            "rayzero_last_step_timestamp_seconds",
            "When the last step finished.",
            "steps.last_at_unix_s",
        ),
        gauge(
            "rayzero_remaining_seconds",
            "Estimated time left, at the recent step time.",
            "remaining_s",
        ),
        counter("rayzero_tokens_total", "Tokens in finished steps.", "facts.counters.tokens"),
        counter("rayzero_samples_total", "Samples in finished steps.", "facts.counters.samples"),
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
            "facts.counters.nonfinite",
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
            "facts.counters.skipped",
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
            "steps.user_values_dropped",
        ),
    ),
    "Speed": (
        histogram(
            "rayzero_step_seconds", "Duration of a step on its slowest rank.", "steps.step_time"
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
    "Data": DATA_SERIES,
    "Ranks": (
        rank_series(
            "rayzero_rank_step",
            "gauge",
            "The step that a rank is working on.",
            lambda rank: rank.beat.step if rank.beat else None,
        ),
        rank_gauge("rayzero_rank_step_seconds", "Duration of a rank's last step.", "step_s"),
        rank_series(
            "rayzero_rank_compute_seconds",
            "gauge",
            "Duration of a rank's last step without the time that it waited for other ranks.",
            _compute_s,
        ),
        rank_series(
            "rayzero_rank_silent_seconds",
            "gauge",
            "Time since a rank's training thread last made progress, as of its last heartbeat.",
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
            "rayzero_patience_seconds",
            "Time without progress after which a rank counts as hung, if no limit is learned.",
            "spec.recovery.patience_s",
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
    "Roles": ROLE_SERIES,
    "Rollouts": ROLLOUT_SERIES,
    "Faults": (
        counter(
            "rayzero_faults_total",
            "Faults that were recorded, by root cause.",
            "faults_by_cause",
            "cause",
        ),
        gauge(
            "rayzero_faults_in_window",
            "Hardware faults that currently count against the fault budget.",
            "faults_in_budget",
        ),
        gauge(
            "rayzero_fault_budget",
            "Hardware faults that are allowed within the window.",
            "spec.recovery.max_faults",
        ),
        counter(
            "rayzero_repairs_total",
            "Faults that the job has recovered from.",
            lambda job: {str(key): job.facts.repairs_by_cause.get(key, 0) for key in FaultCause},
            "cause",
        ),
        counter(
            "rayzero_resizes_total",
            "Completed changes of membership without a fault.",
            "facts.resizes",
        ),
        histogram(
            "rayzero_recovery_seconds",
            "Time from the first sign of a fault to the next finished step, without that step.",
            "recovery_times.total",
        ),
        histogram(
            "rayzero_recovery_phase_seconds",
            "Duration of the phases of a recovery.",
            lambda job: dict(sorted(job.recovery_times.phases.items())),
            "phase",
        ),
        counter(
            "rayzero_steps_redone_total",
            "Finished steps that were lost and had to be trained again.",
            "facts.steps_redone",
        ),
        gauge(
            "rayzero_replica_step",
            "The newest step of which the vaults hold every rank's shard.",
            _replicas(lambda stored: stored.step),
            "place",
        ),
        gauge(
            "rayzero_replica_timestamp_seconds",
            "When the step of rayzero_replica_step finished.",
            _replicas(lambda stored: stored.at_unix_s),
            "place",
        ),
        gauge(
            "rayzero_replica_unprotected_since_timestamp_seconds",
            "Training since this time is in no replica: when the newest replicated step finished; "
            "before there is one, when the first step to be replicated finished.",
            _replicas(lambda stored: stored.unprotected_since_unix_s),
            "place",
        ),
        gauge(
            "rayzero_replica_bytes",
            "Bytes that vaults hold of their own nodes' ranks (`node`), and that the newest step "
            "takes on other nodes (`other`).",
            _replicas(lambda stored: stored.nbytes or None),
            "place",
        ),
    ),
    "Checkpoints": (
        counter(
            "rayzero_checkpoints_total",
            "Checkpoints written by this run.",
            "facts.checkpoints_written",
        ),
        counter(
            "rayzero_checkpoint_failures_total",
            "Failed attempts to write a checkpoint.",
            "facts.checkpoints_failed",
        ),
        gauge("rayzero_checkpoint_step", "Step of the newest checkpoint.", "checkpoints.step"),
        gauge(
            "rayzero_checkpoint_timestamp_seconds",
            "When the newest checkpoint was committed, or when the job resumed from it.",
            "checkpoints.at_unix_s",
        ),
        gauge(
            "rayzero_checkpoint_unprotected_since_timestamp_seconds",
            "Training since this time is in no checkpoint: when the newest was committed or, before"
            " there is one, when this run's first step finished. Only with checkpoint.every_steps.",
            "checkpoints.unprotected_since_unix_s",
        ),
        gauge(
            "rayzero_checkpoint_bytes",
            "Size of the newest checkpoint.",
            lambda job: job.checkpoints.nbytes or None,
        ),
        histogram(
            "rayzero_checkpoint_seconds",
            "Time from the pinned step to the committed manifest, in the background.",
            "checkpoints.write_time",
        ),
        histogram(
            "rayzero_checkpoint_stall_seconds",
            "Time that training was stopped for a checkpoint, on the slowest rank.",
            "checkpoints.stall_time",
        ),
    ),
    "Goodput": (
        gauge(
            "rayzero_goodput_ratio",
            "Share of the time since this run began that was spent in steps that count.",
            lambda job: job.time_breakdown().goodput,
        ),
        counter(
            "rayzero_time_seconds_total",
            "Wall time by cause; `productive` is goodput, the others are lost time.",
            lambda job: job.time_breakdown().seconds,
            "cause",
        ),
        gauge(
            "rayzero_time_unattributed_seconds",
            "Time not attributed to a cause yet: the step or the recovery in progress.",
            lambda job: job.time_breakdown().unattributed_s,
        ),
    ),
}

CATALOG = {series.name: series for series in chain.from_iterable(CATALOG_GROUPS.values())}


def job_families(job: JobMetrics) -> Iterator[Metric]:
    """Yields the metrics of the job as a whole that have a value. Takes about a millisecond."""
    for series in CATALOG.values():
        if isinstance(series, JobSeries) and (family := series.family(job.spec.name, job)).samples:
            yield family


def rank_families(job: str, ranks: RankView) -> Iterator[Metric]:
    """Yields the metrics with one series for each rank, and the sums over ranks."""
    for series in CATALOG.values():
        if isinstance(series, RankSeries) and (family := series.family(job, ranks)).samples:
            yield family
