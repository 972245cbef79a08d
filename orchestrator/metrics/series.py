"""Metric definitions: a row of the catalog with its source, and its conversion to Prometheus.

Values are read only when a scrape asks for them, so a training step costs nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Generic, Literal, TypeAlias, TypeVar, cast

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from rayzero.orchestrator.metrics.job_metrics import Histogram, JobMetrics
from rayzero.orchestrator.metrics.rank_metrics import RankMetrics, RankView

SeriesKind = Literal["gauge", "counter", "histogram"]
Sample: TypeAlias = float | Histogram | None
Samples: TypeAlias = Sample | Mapping[str, Sample] | Mapping[tuple[str, ...], Sample]
"""One value; or values by label value. With several labels besides `job`, a key is a tuple."""
Source = TypeVar("Source")

_BASE_UNITS = ("seconds", "bytes", "ratio")
_FAMILIES = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


@dataclass(frozen=True)
class Series(Generic[Source]):
    """One metric.

    Args:
        read: returns the current values. Values that are None are left out.
        labels: labels besides `job`.
    """

    name: str
    kind: SeriesKind
    help: str
    read: Callable[[Source], Samples]
    labels: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """The base unit, which ends the name; empty for a plain number."""
        last_word = self.name.removesuffix("_total").rpartition("_")[2]
        return last_word if last_word in _BASE_UNITS else ""

    def family(self, job: str, source: Source) -> Metric:
        """Returns the samples of job `job`. A family without samples has nothing to export."""
        samples = self.read(source)
        rows = samples.items() if isinstance(samples, Mapping) else [((), samples)]
        family: Any = _FAMILIES[self.kind](self.name, self.help, labels=("job", *self.labels))
        for label, value in rows:
            labels = (job, label) if isinstance(label, str) else (job, *label)
            if isinstance(value, Histogram):
                family.add_metric(labels, value.cumulative(), value.sum)
            elif value is not None:
                family.add_metric(labels, float(value))
        return cast(Metric, family)


class JobSeries(Series[JobMetrics]):
    """A metric of the job as a whole."""


class RankSeries(Series[RankView]):
    """A metric of the ranks, read from a copy of their table outside of the job's lock."""


JobReader: TypeAlias = str | Callable[[JobMetrics], Samples]
"""A path of attributes, such as `facts.step`, or a function."""


def _job_series(kind: SeriesKind, name: str, text: str, read: JobReader, *labels: str) -> JobSeries:
    reader = attrgetter(read) if isinstance(read, str) else read
    return JobSeries(name, kind, text, reader, labels)


gauge = partial(_job_series, "gauge")
counter = partial(_job_series, "counter")
histogram = partial(_job_series, "histogram")


def step_gauge(name: str, text: str, reported: str) -> JobSeries:
    """Returns a gauge of the value that ranks report as `reported`: its mean in the last step."""
    return gauge(name, text, lambda job: job.steps.gauge(reported))


def rank_series(
    name: str, kind: SeriesKind, text: str, read: Callable[[RankMetrics], float | None]
) -> RankSeries:
    """Returns a series with one sample for each rank."""

    def read_all(ranks: RankView) -> Mapping[str, Sample]:
        return {str(rank): read(metrics) for rank, metrics in ranks.rows}

    return RankSeries(name, kind, text, read_all, ("rank",))


def rank_gauge(name: str, text: str, reported: str) -> RankSeries:
    """Returns a gauge of the value that each rank reports as `reported`, in its last step."""
    return rank_series(name, "gauge", text, lambda rank: rank.gauge(reported))
