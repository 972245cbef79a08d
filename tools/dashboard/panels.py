"""Dashboard panels as data, and constructors of common queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PanelType = Literal["timeseries", "stat", "gauge", "state-timeline"]


Threshold = tuple[float | None, str]


@dataclass(frozen=True)
class Query:
    """A Prometheus expression and the names of its series.

    Args:
        legend: with labels in double braces, Grafana's syntax.
        axis: `right` for values of another unit.
    """

    expr: str
    legend: str
    axis: Literal["left", "right"] = "left"


@dataclass(frozen=True)
class Panel:
    """One panel.

    Args:
        unit: one of Grafana's units, `none` for a plain number.
        thresholds: (lower bound, color); the first bound is None.
        width, height: in Grafana's grid of 24 columns.
        stacked: stack the areas, for parts of a whole.
        show_names: show the series' names instead of values (a `stat` of a state).
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: PanelType = "timeseries"
    thresholds: tuple[Threshold, ...] = ((None, "green"),)
    width: int = 8
    height: int = 8
    stacked: bool = False
    show_names: bool = False
    maximum: float | None = None


@dataclass(frozen=True)
class DashboardRow:
    """A collapsible row of the dashboard."""

    title: str
    panels: tuple[Panel, ...]


JOB_SELECTOR = 'job="$job"'


RANK_SELECTOR = 'job="$job",rank=~"$rank"'


def gauge_query(
    name: str, legend: str, where: str = JOB_SELECTOR, axis: Literal["left", "right"] = "left"
) -> Query:
    """The value of a gauge."""
    return Query(f"{name}{{{where}}}", legend, axis)


def rate_query(name: str, legend: str, where: str = JOB_SELECTOR) -> Query:
    """A counter's rate per second."""
    return Query(f"rate({name}{{{where}}}[$__rate_interval])", legend)


def increase_query(name: str, legend: str) -> Query:
    """A counter's increase between two points of the graph. Only for series that start at 0;
    otherwise the first increase is not visible."""
    return Query(f"increase({name}{{{JOB_SELECTOR}}}[$__rate_interval])", legend)


def mean_query(name: str, legend: str, by: str = "") -> Query:
    """The mean of a histogram."""
    parts = (
        f"rate({name}_{part}{{{JOB_SELECTOR}}}[$__rate_interval])" for part in ("sum", "count")
    )
    sums = (f"sum by ({by}) ({part})" if by else f"sum({part})" for part in parts)
    return Query(" / ".join(sums), legend)


def quantile_query(name: str, quantile: float, legend: str) -> Query:
    """A quantile of a histogram."""
    buckets = f"sum by (le) (rate({name}_bucket{{{JOB_SELECTOR}}}[$__rate_interval]))"
    return Query(f"histogram_quantile({quantile:g}, {buckets})", legend)


def age_query(name: str, legend: str) -> Query:
    """Seconds since a timestamp."""
    return Query(f"time() - {name}{{{JOB_SELECTOR}}}", legend)
