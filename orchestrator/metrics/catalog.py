"""The catalog of all Prometheus metrics, and the walk over it at a scrape.

A metric is one row: name, help, where its value is read, and labels; those of training are in
`catalog_training`. `docs/metrics.md` is generated from the rows. Names follow the Prometheus
conventions: base units, `_total` on counters, times as Unix seconds under `_timestamp_seconds`.
Every metric has the label `job`, so scrapes must honor labels. Those with the label `rank` have one
series for each rank of the newest generation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain

from prometheus_client.core import Metric

from rayzero.orchestrator.metrics.catalog_training import TRAINING_GROUPS
from rayzero.orchestrator.metrics.job_metrics import JobMetrics, StoredStep
from rayzero.orchestrator.metrics.rank_metrics import RankMetricsTable
from rayzero.orchestrator.metrics.series import (
    JobSeries,
    RankSeries,
    Sample,
    Samples,
    counter,
    gauge,
    histogram,
)
from rayzero.orchestrator.policies.failure import FaultCause


def _replicas(read: Callable[[StoredStep], Sample]) -> Callable[[JobMetrics], Samples]:
    """Values by place: vaults of the ranks' own nodes, and of other nodes."""
    return lambda job: {place: read(level) for place, level in job.replicas.by_location.items()}


CATALOG_GROUPS: Mapping[str, tuple[JobSeries | RankSeries, ...]] = {
    **TRAINING_GROUPS,
    "Faults": (
        counter(
            "rayzero_faults_total",
            "Faults that were recorded, by root cause.",
            lambda job: job.faults_by_cause,
            "cause",
        ),
        gauge(
            "rayzero_faults_in_window",
            "Hardware faults that currently count against the fault budget.",
            lambda job: job.faults_in_budget,
        ),
        gauge(
            "rayzero_fault_budget",
            "Hardware faults that are allowed within the window.",
            lambda job: job.spec.recovery.max_faults,
        ),
        counter(
            "rayzero_repairs_total",
            "Faults that the job has recovered from.",
            lambda job: {str(it): job.facts.repairs_by_cause.get(it, 0) for it in FaultCause},
            "cause",
        ),
        counter(
            "rayzero_resizes_total",
            "Completed changes of membership without a fault.",
            lambda job: job.facts.resizes,
        ),
        histogram(
            "rayzero_recovery_seconds",
            "Time from the first sign of a fault to the next finished step, without that step.",
            lambda job: job.recovery_times.total,
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
            lambda job: job.facts.steps_redone,
        ),
        gauge(
            "rayzero_replica_step",
            "The newest step of which the vaults hold every rank's shard.",
            _replicas(lambda level: level.step),
            "place",
        ),
        gauge(
            "rayzero_replica_timestamp_seconds",
            "When that step finished.",
            _replicas(lambda level: level.at_unix_s),
            "place",
        ),
        gauge(
            "rayzero_replica_unprotected_since_timestamp_seconds",
            "Training since this time is in no replica: when the newest replicated step finished, "
            "or, before there is one, the first step that was to be replicated.",
            _replicas(lambda level: level.unprotected_since_unix_s),
            "place",
        ),
        gauge(
            "rayzero_replica_bytes",
            "Bytes that vaults hold of their own nodes' ranks (`node`), and that the newest step "
            "takes on other nodes (`other`).",
            _replicas(lambda level: level.nbytes or None),
            "place",
        ),
    ),
    "Checkpoints": (
        counter(
            "rayzero_checkpoints_total",
            "Checkpoints written by this run.",
            lambda job: job.facts.checkpoints_written,
        ),
        counter(
            "rayzero_checkpoint_failures_total",
            "Failed attempts to write a checkpoint.",
            lambda job: job.facts.checkpoints_failed,
        ),
        gauge(
            "rayzero_checkpoint_step",
            "Step of the newest checkpoint.",
            lambda job: job.checkpoints.step,
        ),
        gauge(
            "rayzero_checkpoint_timestamp_seconds",
            "When the newest checkpoint was committed, or when the job resumed from it.",
            lambda job: job.checkpoints.at_unix_s,
        ),
        gauge(
            "rayzero_checkpoint_unprotected_since_timestamp_seconds",
            "Training since this time is in no checkpoint: when the newest was committed or, before"
            " there is one, when this run's first step finished. Only with checkpoint.every_steps.",
            lambda job: job.checkpoints.unprotected_since_unix_s,
        ),
        gauge(
            "rayzero_checkpoint_bytes",
            "Size of the newest checkpoint.",
            lambda job: job.checkpoints.nbytes or None,
        ),
        histogram(
            "rayzero_checkpoint_seconds",
            "Time from the pinned step to the committed manifest, in the background.",
            lambda job: job.checkpoints.write_time,
        ),
        histogram(
            "rayzero_checkpoint_stall_seconds",
            "Time that training was stopped for a checkpoint, on the slowest rank.",
            lambda job: job.checkpoints.stall_time,
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
    """The metrics of the job as a whole that have a value now. Takes about a millisecond."""
    for series in CATALOG.values():
        if isinstance(series, JobSeries) and (family := series.family(job.spec.name, job)).samples:
            yield family


def rank_families(job: str, ranks: RankMetricsTable) -> Iterator[Metric]:
    """The metrics with one series for each rank, and the sums over ranks."""
    for series in CATALOG.values():
        if isinstance(series, RankSeries) and (family := series.family(job, ranks)).samples:
            yield family
