"""The newest values of each rank of the newest generation, and their sums. No clock, no I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from rayzero.workers.messages import Heartbeat
from rayzero.workers.step_rows import StepRows

TRAFFIC_PREFIX = "collectives/"
"""Of `collectives/NAME/bytes` and `collectives/NAME/calls`, which engines count."""


class RankReport(NamedTuple):
    """A rank's report of a step: one row of several ranks'."""

    rows: StepRows
    row: int

    def gauge(self, name: str) -> float | None:
        return self.rows.gauge(self.row, name)

    def gauges(self) -> dict[str, float]:
        return self.rows.gauges(self.row)


class RankMetrics(NamedTuple):
    """One rank. `report` is that of its last step in this generation; `exposed_comm_s` and
    `data_wait_s` are the total waits for other ranks and for data under this rank number."""

    report: RankReport | None
    beat: Heartbeat | None
    node: str
    exposed_comm_s: float
    data_wait_s: float

    def gauge(self, name: str) -> float | None:
        return self.report.gauge(name) if self.report is not None else None


@lru_cache(maxsize=64)
def _traffic_names(gauges: tuple[str, ...]) -> tuple[str, ...]:
    """Nearly all ranks report the same gauges, and each repair asks all of them."""
    return tuple(name for name in gauges if name.startswith(TRAFFIC_PREFIX))


def _add_traffic(report: RankReport, totals: defaultdict[str, float]) -> None:
    """Adds the bytes that a rank's engine has communicated since it was built."""
    for name in _traffic_names(report.rows.names):
        totals[name] += max(0.0, report.gauge(name) or 0.0)


@dataclass
class RankMetricsTable:
    """The ranks of the newest generation, in columns by rank: there may be thousands, and a reader
    copies them under the lock that the controller takes for each report.

    A report costs less than a microsecond: engines count their traffic cumulatively, so it suffices
    to add an engine's last count when it is replaced, and when the sums are read.

    Attributes:
        departed_traffic: of engines that no longer exist.
    """

    nodes: dict[int, str] = field(default_factory=dict)
    reports: dict[int, RankReport] = field(default_factory=dict)
    beats: dict[int, Heartbeat] = field(default_factory=dict)
    exposed_comm_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    data_wait_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    departed_traffic: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def start_generation(self, nodes: Sequence[str]) -> None:
        """A generation of these nodes, by rank; ranks that it does not have are removed."""
        for rank in [rank for rank in self.reports if rank >= len(nodes)]:
            _add_traffic(self.reports.pop(rank), self.departed_traffic)
        self.beats = {rank: beat for rank, beat in self.beats.items() if rank < len(nodes)}
        self.nodes = dict(enumerate(nodes))

    def copy(self) -> RankMetricsTable:
        return replace(self, **{name: column.copy() for name, column in vars(self).items()})

    @property
    def rows(self) -> list[tuple[int, RankMetrics]]:
        """The ranks, in their order."""
        ranks = sorted({*self.nodes, *self.reports, *self.beats})
        return [(rank, self._row(rank)) for rank in ranks]

    def _row(self, rank: int) -> RankMetrics:
        report, beat, node = self.reports.get(rank), self.beats.get(rank), self.nodes.get(rank, "")
        return RankMetrics(report, beat, node, self.exposed_comm_s[rank], self.data_wait_s[rank])

    def on_rows(self, rows: StepRows) -> None:
        waits = zip(rows.column("exposed_comm_s"), rows.column("phases/data"), strict=True)
        for row, (rank, (exposed_s, data_wait_s)) in enumerate(zip(rows.ranks, waits, strict=True)):
            last = self.reports.get(rank)
            if last is not None and last.rows.generation != rows.generation:
                _add_traffic(last, self.departed_traffic)
            self.exposed_comm_s[rank] += max(0.0, exposed_s)
            self.data_wait_s[rank] += max(0.0, data_wait_s)
            self.reports[rank] = RankReport(rows, row)

    def on_heartbeat(self, beat: Heartbeat) -> None:
        self.beats[beat.rank] = beat

    def traffic(self) -> defaultdict[str, float]:
        """The sums over all ranks since the run began, by name."""
        totals = self.departed_traffic.copy()
        for report in self.reports.values():
            _add_traffic(report, totals)
        return totals
