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

from rayzero.orchestrator.metrics.catalog import CATALOG
from rayzero.orchestrator.metrics.histogram import Histogram
from rayzero.orchestrator.metrics.ranks import Rank, Ranks
from rayzero.orchestrator.metrics.tally import Now, Tally
from rayzero.orchestrator.policies.failure import Cause
from rayzero.orchestrator.states import State

Value: TypeAlias = float | Histogram | None
Row: TypeAlias = tuple[tuple[str, ...], Value]
"""The values of the labels beside `job`, and the value."""
Rows: TypeAlias = Iterator[tuple[str, Iterable[Row]]]
"""Series by name."""

_CLASS = "bytes/"


def job_families(tally: Tally, now: Now) -> Iterator[Metric]:
    """Every series of the job as a whole that has a value at this moment. A millisecond's work."""
    for source in _SOURCES:
        yield from _families(tally.facts.name, source(tally, now))


def rank_families(job: str, ranks: Ranks) -> Iterator[Metric]:
    """Every series with a row for each rank, or a sum over them."""
    yield from _families(job, _ranks(ranks))


def _families(job: str, found: Rows) -> Iterator[Metric]:
    for name, rows in found:
        family = _family(name, job, rows)
        if family.samples:
            yield family


def _job(tally: Tally, now: Now) -> Rows:
    stage = "" if tally.facts.stage is None else str(tally.facts.stage)
    yield "rayzero_info", [((version("rayzero"), stage), 1)]
    yield "rayzero_state", [((str(one),), float(one is tally.state)) for one in State]
    yield "rayzero_state_timestamp_seconds", _one(tally.state_at.unix_s)
    yield "rayzero_start_timestamp_seconds", _one(tally.began.unix_s)
    yield "rayzero_world_size", _one(tally.world_size)
    yield "rayzero_generation", _one(tally.generation)
    least, most = tally.limits
    yield "rayzero_workers", [(("min",), least), (("max",), most)]
    yield "rayzero_hang_timeout_seconds", _one(tally.facts.hang_timeout_s)


def _progress(tally: Tally, now: Now) -> Rows:
    steps = tally.steps
    yield "rayzero_step", _one(steps.step)
    yield "rayzero_target_steps", _one(tally.facts.steps)
    yield "rayzero_steps_total", _one(steps.done)
    yield "rayzero_last_step_timestamp_seconds", _one(steps.last_at_unix_s)
    yield "rayzero_remaining_seconds", _one(steps.remaining_s(tally.facts.steps))
    yield "rayzero_tokens_total", _one(steps.tokens)
    yield "rayzero_samples_total", _one(steps.samples)


def _training(tally: Tally, now: Now) -> Rows:
    steps = tally.steps
    gauges = steps.last.gauges if steps.last else {}
    yield "rayzero_loss", _one(steps.last.loss if steps.last else None)
    yield "rayzero_nonfinite_losses_total", _one(steps.nonfinite)
    yield "rayzero_learning_rate", _one(gauges.get("lr"))
    yield "rayzero_gradient_norm", _one(gauges.get("grad_norm"))
    yield "rayzero_loss_scale", _one(gauges.get("loss_scale"))
    yield "rayzero_skipped_steps_total", _one(steps.skipped)
    yield "rayzero_model_flops_utilization_ratio", _one(gauges.get("mfu"))
    own = sorted(steps.own.values.items())
    yield "rayzero_user_value", [((name,), value) for name, value in own]
    yield "rayzero_user_values_left_out_total", _one(steps.own.left_out)


def _speed(tally: Tally, now: Now) -> Rows:
    steps = tally.steps
    yield "rayzero_step_seconds", _one(steps.whole)
    phases = sorted(steps.phases.items())
    yield "rayzero_step_phase_seconds", [((phase,), seconds) for phase, seconds in phases]


def _ranks(ranks: Ranks) -> Rows:
    moved = sorted(ranks.moved().items())
    for what in ("bytes", "calls"):
        rows: list[Row] = [((name,), amount) for (kind, name), amount in moved if kind == what]
        yield f"rayzero_communication_{what}_total", rows
    by_rank = [((str(rank),), one) for rank, one in sorted(ranks.by_rank.items())]
    reported = [(label, one) for label, one in by_rank if one.report is not None]
    beating = [(label, one.beat) for label, one in by_rank if one.beat is not None]
    yield "rayzero_rank_step", [(label, beat.step) for label, beat in beating]
    yield "rayzero_rank_silent_seconds", [(label, beat.silent_s) for label, beat in beating]
    yield "rayzero_rank_step_seconds", [(label, one.gauge("step_s")) for label, one in reported]
    yield "rayzero_rank_compute_seconds", [(label, _compute_s(one)) for label, one in reported]
    exposed = [(label, one.exposed_s) for label, one in reported if _has(one, "exposed_comm_s")]
    yield "rayzero_exposed_communication_seconds_total", exposed
    waited = [(label, one.data_wait_s) for label, one in reported if _has(one, "phases/data")]
    yield "rayzero_data_wait_seconds_total", waited
    held: list[Row] = [
        ((*label, name.removeprefix(_CLASS)), amount)
        for label, one in reported
        if one.report is not None
        for name, amount in sorted(one.report.gauges.items())
        if name.startswith(_CLASS)
    ]
    yield "rayzero_memory_bytes", held
    for series, gauge in (
        ("rayzero_process_resident_memory_bytes", "resident_bytes"),
        ("rayzero_device_peak_memory_bytes", "device_peak_bytes"),
    ):
        yield series, [(label, one.gauge(gauge)) for label, one in reported]


def _troubles(tally: Tally, now: Now) -> Rows:
    troubles = tally.troubles
    for series, counted in (
        ("rayzero_faults_total", troubles.by_cause),
        ("rayzero_repairs_total", troubles.repairs),
    ):
        yield series, [((str(cause),), counted[cause]) for cause in Cause]
    yield "rayzero_faults_in_window", _one(troubles.spent(now.s))
    yield "rayzero_fault_budget", _one(troubles.budget.max_faults)
    yield "rayzero_resizes_total", _one(troubles.resizes)
    yield "rayzero_recovery_seconds", _one(troubles.whole)
    parts = sorted(troubles.parts.items())
    yield "rayzero_recovery_phase_seconds", [((part,), seconds) for part, seconds in parts]
    yield "rayzero_steps_redone_total", _one(troubles.steps_redone)


def _replicas(tally: Tally, now: Now) -> Rows:
    places = [((place,), one) for place, one in tally.replicas.places.items()]
    there = [(place, one) for place, one in places if one.step is not None]
    yield "rayzero_replica_step", [(place, one.step) for place, one in there]
    yield "rayzero_replica_timestamp_seconds", [(place, one.at_unix_s) for place, one in there]
    yield "rayzero_replica_owed_timestamp_seconds", [(p, one.owed_unix_s) for p, one in places]
    yield "rayzero_replica_bytes", [(place, one.nbytes) for place, one in there]


def _checkpoints(tally: Tally, now: Now) -> Rows:
    stored = tally.checkpoints
    yield "rayzero_checkpoints_total", _one(stored.written)
    yield "rayzero_checkpoint_failures_total", _one(stored.failed)
    yield "rayzero_checkpoint_step", _one(stored.step)
    at_s = None if stored.step is None else stored.at_unix_s
    yield "rayzero_checkpoint_timestamp_seconds", _one(at_s)
    yield "rayzero_checkpoint_owed_timestamp_seconds", _one(stored.owed_unix_s)
    yield "rayzero_checkpoint_bytes", _one(stored.nbytes or None)
    yield "rayzero_checkpoint_seconds", _one(stored.seconds)
    yield "rayzero_checkpoint_stop_seconds", _one(stored.stops)


def _time(tally: Tally, now: Now) -> Rows:
    times = tally.times(now)
    yield "rayzero_goodput_ratio", _one(times.goodput)
    yield "rayzero_time_seconds_total", [((str(why),), s) for why, s in times.seconds.items()]
    yield "rayzero_time_pending_seconds", _one(times.pending_s)


_SOURCES = (_job, _progress, _training, _speed, _troubles, _replicas, _checkpoints, _time)


def _one(value: Value) -> list[Row]:
    return [((), value)]


def _has(one: Rank, name: str) -> bool:
    return one.gauge(name) is not None


def _compute_s(one: Rank) -> float | None:
    step_s, exposed_s = one.gauge("step_s"), one.gauge("exposed_comm_s")
    return None if step_s is None or exposed_s is None else step_s - exposed_s


def _family(name: str, job: str, rows: Iterable[Row]) -> Metric:
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
