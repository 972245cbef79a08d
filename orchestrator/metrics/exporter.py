"""From the tally to Prometheus: made when it is asked for, so a step costs nothing here.

A series without a value, such as the loss of a job that reports none, is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from rayzero.orchestrator.events import State
from rayzero.orchestrator.metrics.catalog import CATALOG
from rayzero.orchestrator.metrics.components import RankMetrics, RankMetricsTable
from rayzero.orchestrator.metrics.job_metrics import JobMetrics, Timestamps
from rayzero.orchestrator.metrics.primitives import Histogram
from rayzero.orchestrator.policies.failure import FaultCause

SampleValue: TypeAlias = float | Histogram | None
SeriesRow: TypeAlias = tuple[tuple[str, ...], SampleValue]
"""The values of the labels beside `job`, and the value."""
SeriesRows: TypeAlias = Iterator[tuple[str, Iterable[SeriesRow]]]
"""Series by name."""

_MEMORY_CLASS_PREFIX = "bytes/"


def job_families(tally: JobMetrics, now: Timestamps) -> Iterator[Metric]:
    """Every series of the job as a whole that has a value at this moment. A millisecond's work."""
    for source in _ROW_SOURCES:
        yield from _nonempty_families(tally.info.name, source(tally, now))


def rank_families(job: str, ranks: RankMetricsTable) -> Iterator[Metric]:
    """Every series with a row for each rank, or a sum over them."""
    yield from _nonempty_families(job, _rank_rows(ranks))


def _nonempty_families(job: str, found: SeriesRows) -> Iterator[Metric]:
    for name, rows in found:
        family = _make_family(name, job, rows)
        if family.samples:
            yield family


def _job_rows(tally: JobMetrics, now: Timestamps) -> SeriesRows:
    stage = "" if tally.info.stage is None else str(tally.info.stage)
    yield "rayzero_info", [((version("rayzero"), stage), 1)]
    yield "rayzero_state", [((str(one),), float(one is tally.state)) for one in State]
    yield "rayzero_state_timestamp_seconds", _unlabelled(tally.state_since.unix_s)
    yield "rayzero_start_timestamp_seconds", _unlabelled(tally.started.unix_s)
    yield "rayzero_world_size", _unlabelled(tally.world_size)
    yield "rayzero_generation", _unlabelled(tally.generation)
    least, most = tally.worker_limits
    yield "rayzero_workers", [(("min",), least), (("max",), most)]
    yield "rayzero_hang_timeout_seconds", _unlabelled(tally.info.hang_timeout_s)


def _progress_rows(tally: JobMetrics, now: Timestamps) -> SeriesRows:
    steps = tally.steps
    yield "rayzero_step", _unlabelled(steps.step)
    yield "rayzero_target_steps", _unlabelled(tally.info.target_steps)
    yield "rayzero_steps_total", _unlabelled(steps.done)
    yield "rayzero_last_step_timestamp_seconds", _unlabelled(steps.last_at_unix_s)
    yield "rayzero_remaining_seconds", _unlabelled(steps.remaining_s(tally.info.target_steps))
    yield "rayzero_tokens_total", _unlabelled(steps.tokens)
    yield "rayzero_samples_total", _unlabelled(steps.samples)


def _training_rows(tally: JobMetrics, now: Timestamps) -> SeriesRows:
    steps = tally.steps
    gauges = steps.last_record.gauges if steps.last_record else {}
    yield "rayzero_loss", _unlabelled(steps.last_record.loss if steps.last_record else None)
    yield "rayzero_nonfinite_losses_total", _unlabelled(steps.nonfinite)
    yield "rayzero_learning_rate", _unlabelled(gauges.get("lr"))
    yield "rayzero_gradient_norm", _unlabelled(gauges.get("grad_norm"))
    yield "rayzero_loss_scale", _unlabelled(gauges.get("loss_scale"))
    yield "rayzero_skipped_steps_total", _unlabelled(steps.skipped)
    yield "rayzero_model_flops_utilization_ratio", _unlabelled(gauges.get("mfu"))
    own = sorted(steps.user_metrics.values.items())
    yield "rayzero_user_value", [((name,), value) for name, value in own]
    yield "rayzero_user_values_left_out_total", _unlabelled(steps.user_metrics.dropped)


def _speed_rows(tally: JobMetrics, now: Timestamps) -> SeriesRows:
    steps = tally.steps
    yield "rayzero_step_seconds", _unlabelled(steps.step_time)
    phases = sorted(steps.phase_times.items())
    yield "rayzero_step_phase_seconds", [((phase,), seconds) for phase, seconds in phases]


def _rank_rows(ranks: RankMetricsTable) -> SeriesRows:
    moved = sorted(ranks.traffic().items())
    for what in ("bytes", "calls"):
        rows: list[SeriesRow] = [
            ((name,), amount) for (kind, name), amount in moved if kind == what
        ]
        yield f"rayzero_communication_{what}_total", rows
    by_rank = [((str(rank),), one) for rank, one in sorted(ranks.by_rank.items())]
    reported = [(label, one) for label, one in by_rank if one.report is not None]
    beating = [(label, one.beat) for label, one in by_rank if one.beat is not None]
    yield "rayzero_rank_step", [(label, beat.step) for label, beat in beating]
    yield "rayzero_rank_silent_seconds", [(label, beat.silent_s) for label, beat in beating]
    yield "rayzero_rank_step_seconds", [(label, one.gauge("step_s")) for label, one in reported]
    yield "rayzero_rank_compute_seconds", [(label, _compute_s(one)) for label, one in reported]
    exposed = [
        (label, one.exposed_comm_s)
        for label, one in reported
        if _reports_gauge(one, "exposed_comm_s")
    ]
    yield "rayzero_exposed_communication_seconds_total", exposed
    waited = [
        (label, one.data_wait_s) for label, one in reported if _reports_gauge(one, "phases/data")
    ]
    yield "rayzero_data_wait_seconds_total", waited
    held: list[SeriesRow] = [
        ((*label, name.removeprefix(_MEMORY_CLASS_PREFIX)), amount)
        for label, one in reported
        if one.report is not None
        for name, amount in sorted(one.report.gauges.items())
        if name.startswith(_MEMORY_CLASS_PREFIX)
    ]
    yield "rayzero_memory_bytes", held
    for series, gauge in (
        ("rayzero_process_resident_memory_bytes", "resident_bytes"),
        ("rayzero_device_peak_memory_bytes", "device_peak_bytes"),
    ):
        yield series, [(label, one.gauge(gauge)) for label, one in reported]


def _fault_rows(tally: JobMetrics, now: Timestamps) -> SeriesRows:
    troubles = tally.faults
    for series, counted in (
        ("rayzero_faults_total", troubles.faults_by_cause),
        ("rayzero_repairs_total", troubles.repairs_by_cause),
    ):
        yield series, [((str(cause),), counted[cause]) for cause in FaultCause]
    yield "rayzero_faults_in_window", _unlabelled(troubles.budget_used(now.clock_s))
    yield "rayzero_fault_budget", _unlabelled(troubles.budget.max_faults)
    yield "rayzero_resizes_total", _unlabelled(troubles.resizes)
    yield "rayzero_recovery_seconds", _unlabelled(troubles.recovery_time)
    parts = sorted(troubles.phase_times.items())
    yield "rayzero_recovery_phase_seconds", [((part,), seconds) for part, seconds in parts]
    yield "rayzero_steps_redone_total", _unlabelled(troubles.steps_redone)


def _replica_rows(tally: JobMetrics, now: Timestamps) -> SeriesRows:
    places = [((place,), one) for place, one in tally.replicas.by_location.items()]
    there = [(place, one) for place, one in places if one.step is not None]
    yield "rayzero_replica_step", [(place, one.step) for place, one in there]
    yield "rayzero_replica_timestamp_seconds", [(place, one.at_unix_s) for place, one in there]
    yield (
        "rayzero_replica_owed_timestamp_seconds",
        [(p, one.unprotected_since_unix_s) for p, one in places],
    )
    yield "rayzero_replica_bytes", [(place, one.nbytes) for place, one in there]


def _checkpoint_rows(tally: JobMetrics, now: Timestamps) -> SeriesRows:
    stored = tally.checkpoints
    yield "rayzero_checkpoints_total", _unlabelled(stored.written)
    yield "rayzero_checkpoint_failures_total", _unlabelled(stored.failed)
    yield "rayzero_checkpoint_step", _unlabelled(stored.step)
    at_s = None if stored.step is None else stored.at_unix_s
    yield "rayzero_checkpoint_timestamp_seconds", _unlabelled(at_s)
    yield "rayzero_checkpoint_owed_timestamp_seconds", _unlabelled(stored.unprotected_since_unix_s)
    yield "rayzero_checkpoint_bytes", _unlabelled(stored.nbytes or None)
    yield "rayzero_checkpoint_seconds", _unlabelled(stored.write_time)
    yield "rayzero_checkpoint_stop_seconds", _unlabelled(stored.stall_time)


def _time_rows(tally: JobMetrics, now: Timestamps) -> SeriesRows:
    times = tally.time_breakdown(now)
    yield "rayzero_goodput_ratio", _unlabelled(times.goodput)
    yield "rayzero_time_seconds_total", [((str(why),), s) for why, s in times.seconds.items()]
    yield "rayzero_time_pending_seconds", _unlabelled(times.unattributed_s)


_ROW_SOURCES = (
    _job_rows,
    _progress_rows,
    _training_rows,
    _speed_rows,
    _fault_rows,
    _replica_rows,
    _checkpoint_rows,
    _time_rows,
)


def _unlabelled(value: SampleValue) -> list[SeriesRow]:
    return [((), value)]


def _reports_gauge(one: RankMetrics, name: str) -> bool:
    return one.gauge(name) is not None


def _compute_s(one: RankMetrics) -> float | None:
    step_s, exposed_s = one.gauge("step_s"), one.gauge("exposed_comm_s")
    return None if step_s is None or exposed_s is None else step_s - exposed_s


def _make_family(name: str, job: str, rows: Iterable[SeriesRow]) -> Metric:
    series = CATALOG[name]
    labels = ("job", *series.labels)
    if series.kind == "histogram":
        counts = HistogramMetricFamily(name, series.help, labels=labels)
        for label, value in rows:
            if isinstance(value, Histogram):
                counts.add_metric((job, *label), value.cumulative(), value.sum)
        return counts
    make = CounterMetricFamily if series.kind == "counter" else GaugeMetricFamily
    family = make(name, series.help, labels=labels)
    for label, value in rows:
        if isinstance(value, int | float):
            family.add_metric((job, *label), float(value))
    return family
