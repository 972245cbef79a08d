"""Metric definitions: a row of the catalog with its source, and its conversion to Prometheus.

Values are read only when a scrape asks for them, so a training step costs nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from rayzero.orchestrator.metrics.histograms import Histogram
from rayzero.orchestrator.metrics.job_metrics import JobMetrics, Timestamps
from rayzero.orchestrator.metrics.rank_metrics import RankMetrics, RankMetricsTable

SeriesKind = Literal["gauge", "counter", "histogram"]
Sample: TypeAlias = float | Histogram | None
Samples: TypeAlias = Sample | Mapping[str, Sample] | Mapping[tuple[str, ...], Sample]
"""One value, or values by label value; a tuple where there are several labels beside `job`."""
Source = TypeVar("Source")


@dataclass(frozen=True)
class JobReading:
    """The source of the metrics of the job as a whole: its counts, and the time of the scrape."""

    job: JobMetrics
    now: Timestamps


@dataclass(frozen=True)
class Series(Generic[Source]):
    """One metric.

    Args:
        unit: of the value; empty for a plain number.
        read: returns the current values; samples that are None are left out.
        labels: beside `job`.
        gauge: the name under which ranks report the value, if it is reported as one.
        journal_field: the `StepTotals` field of a counter that the journal stores, so that it
            continues when another controller adopts the run.
    """

    name: str
    kind: SeriesKind
    unit: str
    help: str
    read: Callable[[Source], Samples]
    labels: tuple[str, ...] = ()
    gauge: str = ""
    journal_field: str = ""

    def family(self, job: str, source: Source) -> Metric:
        """The samples of job `job`; a family without samples has nothing to export."""
        samples = self.read(source)
        rows = samples.items() if isinstance(samples, Mapping) else [((), samples)]
        labels = ("job", *self.labels)
        if self.kind == "histogram":
            family = HistogramMetricFamily(self.name, self.help, labels=labels)
            for label, value in rows:
                if isinstance(value, Histogram):
                    family.add_metric((job, *_tuple(label)), value.cumulative(), value.sum)
            return family
        make = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        scalars = make(self.name, self.help, labels=labels)
        for label, value in rows:
            if isinstance(value, int | float):
                scalars.add_metric((job, *_tuple(label)), float(value))
        return scalars


class JobSeries(Series[JobReading]):
    """A metric of the job as a whole."""


class RankSeries(Series[RankMetricsTable]):
    """A metric of the ranks, read from a copy of their table outside of the job's lock."""


def gauge(
    name: str, unit: str, text: str, read: Callable[[JobReading], Samples], *labels: str
) -> JobSeries:
    return JobSeries(name, "gauge", unit, text, read, labels)


def counter(
    name: str,
    unit: str,
    text: str,
    read: Callable[[JobReading], Samples],
    *labels: str,
    journal_field: str = "",
) -> JobSeries:
    return JobSeries(name, "counter", unit, text, read, labels, journal_field=journal_field)


def histogram(
    name: str, text: str, read: Callable[[JobReading], Samples], *labels: str
) -> JobSeries:
    return JobSeries(name, "histogram", "seconds", text, read, labels)


def step_gauge(name: str, unit: str, text: str, reported: str) -> JobSeries:
    """What ranks report as `reported`: the mean over ranks, in the last step."""
    return JobSeries(
        name, "gauge", unit, text, lambda r: r.job.steps.gauge(reported), gauge=reported
    )


def rank_series(
    name: str,
    kind: SeriesKind,
    unit: str,
    text: str,
    read: Callable[[RankMetrics], float | None],
    reported: str = "",
) -> RankSeries:
    """One sample for each rank."""

    def read_all(ranks: RankMetricsTable) -> Mapping[str, Sample]:
        return {str(rank): read(metrics) for rank, metrics in ranks.by_rank.items()}

    return RankSeries(name, kind, unit, text, read_all, ("rank",), gauge=reported)


def rank_gauge(name: str, unit: str, text: str, reported: str) -> RankSeries:
    """What each rank reports as `reported`, in its last step."""
    return rank_series(name, "gauge", unit, text, lambda rank: rank.gauge(reported), reported)


def _tuple(label: str | tuple[str, ...]) -> tuple[str, ...]:
    return (label,) if isinstance(label, str) else label
