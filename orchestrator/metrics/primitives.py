"""Series, Histogram, Curve/History, user metrics.

What a row of the catalog says of a series.

Counts by size, as Prometheus wants them. Pure.

What the training function reports of its own, apart from what every job tells. Pure.

What a job went through, as much of it as a page can show: every list has its bound. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

STEP_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    300,
)


RECOVERY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


CHECKPOINT_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Histogram:
    """How many values were at most as large as each bound.

    Args:
        bounds: rising; values above the last one count, too.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(bound, values up to it), the last bound infinite."""
        found, total = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            found.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(total)))
        return found


MAX_USER_METRICS = 100
"""Maximum number of user metric names of a job; bounds the number of Prometheus series."""

GaugeFilter = Callable[[Mapping[str, float]], Iterator[tuple[str, float]]]
"""Selects the values of the training function among all that ranks report."""


@dataclass
class UserMetrics:
    """Values that the training function reports.

    Args:
        values: the last one under each name; a step need not report every name.
        dropped: number of values under names beyond the first `MAX_USER_METRICS`.
    """

    user_gauges: GaugeFilter
    values: dict[str, float] = field(default_factory=dict)
    dropped: int = 0

    def add(self, gauges: Mapping[str, float]) -> None:
        for name, value in self.user_gauges(gauges):
            if name in self.values or len(self.values) < MAX_USER_METRICS:
                self.values[name] = value
            else:
                self.dropped += 1


MAX_POINTS = 512
"""The most points of a curve."""


MAX_HISTORY_ENTRIES = 256
"""The most entries of a list; the oldest go."""


class BoundedCurve:
    """A curve with a bounded number of points: when there are too many, every other one goes."""

    def __init__(self, most: int = MAX_POINTS) -> None:
        self._max_points = most
        self._points: list[tuple[int, float]] = []
        self._stride = 1
        self._count = 0
        self._last: tuple[int, float] | None = None

    def add(self, x: int, y: float) -> None:
        self._last = (x, y)
        if self._count % self._stride == 0:
            self._points.append(self._last)
            if len(self._points) > self._max_points:
                self._points = self._points[::2]
                self._stride *= 2
        self._count += 1

    def rewind(self, x: int) -> None:
        """What was at this x and beyond is done again."""
        while self._points and self._points[-1][0] >= x:
            self._points.pop()

    def points(self) -> list[tuple[int, float]]:
        """In the order they came, the newest one always among them."""
        if self._last is None or (self._points and self._points[-1] == self._last):
            return list(self._points)
        return [*self._points, self._last]


def _bounded() -> deque[dict[str, Any]]:
    return deque(maxlen=MAX_HISTORY_ENTRIES)


@dataclass
class DisplayHistory:
    """Entries as JSON can hold them; times are Unix seconds.

    Args:
        loss: by step.
        generations: every process group: when it stood, and its size.
        faults: what was seen, by cause, rank and step.
        ways: repairs and resizes, with how long each took.
        checkpoints: those that were written.
    """

    loss: BoundedCurve = field(default_factory=BoundedCurve)
    generations: deque[dict[str, Any]] = field(default_factory=_bounded)
    faults: deque[dict[str, Any]] = field(default_factory=_bounded)
    recoveries: deque[dict[str, Any]] = field(default_factory=_bounded)
    checkpoints: deque[dict[str, Any]] = field(default_factory=_bounded)
