"""A panel of the dashboard as data, with what most of them have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PanelType = Literal["timeseries", "stat", "gauge", "state-timeline"]


Threshold = tuple[float | None, str]


@dataclass(frozen=True)
class Query:
    """An expression and how its series are called.

    Args:
        legend: with labels in braces, as Grafana writes them.
        axis: `right` for a quantity with an axis of its own.
    """

    expr: str
    legend: str
    axis: Literal["left", "right"] = "left"


@dataclass(frozen=True)
class Panel:
    """One panel.

    Args:
        unit: one of Grafana's units, `none` for a plain number.
        thresholds: from which value on which colour; the first begins at None.
        width, height: in Grafana's grid of 24 columns.
        stacked: areas on top of each other, for parts of a whole.
        names: show the series' names instead of values (a `stat` of a state).
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
    """A row of the dashboard that can be folded."""

    title: str
    panels: tuple[Panel, ...]


JOB_SELECTOR = 'job="$job"'


RANK_SELECTOR = 'job="$job",rank=~"$rank"'


def gauge_query(
    name: str, legend: str, where: str = JOB_SELECTOR, axis: Literal["left", "right"] = "left"
) -> Query:
    """A gauge as it is."""
    return Query(f"{name}{{{where}}}", legend, axis)


def rate_query(name: str, legend: str, where: str = JOB_SELECTOR) -> Query:
    """A counter, a second."""
    return Query(f"rate({name}{{{where}}}[$__rate_interval])", legend)


def increase_query(name: str, legend: str) -> Query:
    """How much a counter grew between two points of the graph. Not for one whose series begin with
    what they count: its first growth would not be seen."""
    return Query(f"increase({name}{{{JOB_SELECTOR}}}[$__rate_interval])", legend)


def mean_query(name: str, legend: str, by: str = "") -> Query:
    """The mean of what a histogram saw."""
    parts = (
        f"rate({name}_{part}{{{JOB_SELECTOR}}}[$__rate_interval])" for part in ("sum", "count")
    )
    sums = (f"sum by ({by}) ({part})" if by else f"sum({part})" for part in parts)
    return Query(" / ".join(sums), legend)


def quantile_query(name: str, at: float, legend: str) -> Query:
    """A quantile of what a histogram saw."""
    buckets = f"sum by (le) (rate({name}_bucket{{{JOB_SELECTOR}}}[$__rate_interval]))"
    return Query(f"histogram_quantile({at:g}, {buckets})", legend)


def age_query(name: str, legend: str) -> Query:
    """Seconds since a point in time."""
    return Query(f"time() - {name}{{{JOB_SELECTOR}}}", legend)
