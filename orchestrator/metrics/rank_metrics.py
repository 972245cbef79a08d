"""The newest values of each rank of the newest generation, and their sums. No clock, no I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from rayzero.workers.messages import Heartbeat
from rayzero.workers.step_rows import Heartbeats, StepRows

TRAFFIC_PREFIX = "collectives/"
"""Of `collectives/NAME/bytes` and `collectives/NAME/calls`, which engines count."""


class RankReport(NamedTuple):
    """A rank's report of a step: one row of several ranks'."""

    rows: StepRows
    row: int

    def gauge(self, name: str) -> float | None:
        return self.rows.gauge(self.row, name)

    def gauges(self, prefix: str) -> dict[str, float | None]:
        """Those whose names begin so, in order."""
        return {name: self.gauge(name) for name in _names_with(prefix, self.rows.names)}


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


class RankView(NamedTuple):
    """The ranks, in their order, and the sums of their traffic: made once for all that a scrape
    reads."""

    rows: list[tuple[int, RankMetrics]]
    traffic: Mapping[str, float]


@lru_cache(maxsize=64)
def _names_with(prefix: str, gauges: tuple[str, ...]) -> tuple[str, ...]:
    """Nearly all ranks report the same gauges, and each repair and scrape asks all of them."""
    return tuple(sorted(name for name in gauges if name.startswith(prefix)))


def _add_traffic(reports: Mapping[int, StepRows], totals: defaultdict[str, float]) -> None:
    """Adds the bytes that the engines of these ranks have communicated since they were built."""
    ranks: defaultdict[int, list[int]] = defaultdict(list)
    records = {id(rows): rows for rows in reports.values()}
    for rank, rows in reports.items():
        ranks[id(rows)].append(rank)
    for key, rows in records.items():
        at = [*map(rows.ranks.index, ranks[key])]
        for name in _names_with(TRAFFIC_PREFIX, rows.names):
            column = rows.column(name)
            totals[name] += sum(max(0.0, column[row]) for row in at)


@dataclass
class RankMetricsTable:
    """The ranks of the newest generation, in columns by rank: there may be thousands, and a reader
    copies them under the lock that the controller takes for each report.

    A report costs less than a microsecond: engines count their traffic cumulatively, so it suffices
    to add an engine's last count when it is replaced, and when the sums are read.

    Attributes:
        reports, beats: the records that have each rank's newest.
        departed_traffic: of engines that no longer exist.
    """

    nodes: dict[int, str] = field(default_factory=dict)
    reports: dict[int, StepRows] = field(default_factory=dict)
    beats: dict[int, Heartbeats] = field(default_factory=dict)
    exposed_comm_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    data_wait_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    departed_traffic: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def start_generation(self, nodes: Sequence[str]) -> None:
        """A generation of these nodes, by rank; ranks that it does not have are removed."""
        gone = [rank for rank in self.reports if rank >= len(nodes)]
        _add_traffic({rank: self.reports.pop(rank) for rank in gone}, self.departed_traffic)
        self.beats = {rank: beat for rank, beat in self.beats.items() if rank < len(nodes)}
        self.nodes = dict(enumerate(nodes))

    def copy(self) -> RankMetricsTable:
        return replace(self, **{name: column.copy() for name, column in vars(self).items()})

    def view(self) -> RankView:
        return RankView(self.rows, self.traffic())

    @property
    def rows(self) -> list[tuple[int, RankMetrics]]:
        """The ranks, in their order."""
        ranks = sorted({*self.nodes, *self.reports, *self.beats})
        return [(rank, self._row(rank)) for rank in ranks]

    def _row(self, rank: int) -> RankMetrics:
        rows, beats, node = self.reports.get(rank), self.beats.get(rank), self.nodes.get(rank, "")
        beat = beats.row(beats.ranks.index(rank)) if beats is not None else None
        report = RankReport(rows, rows.ranks.index(rank)) if rows is not None else None
        return RankMetrics(report, beat, node, self.exposed_comm_s[rank], self.data_wait_s[rank])

    def on_rows(self, rows: StepRows) -> None:
        last = ((rank, self.reports.get(rank, rows)) for rank in rows.ranks)
        gone = {rank: its for rank, its in last if its.generation != rows.generation}
        if gone:
            _add_traffic(gone, self.departed_traffic)
        self.reports.update(dict.fromkeys(rows.ranks, rows))
        for name, totals_s in (
            ("exposed_comm_s", self.exposed_comm_s),
            ("phases/data", self.data_wait_s),
        ):
            for rank, seconds in zip(rows.ranks, rows.column(name), strict=True):
                if seconds > 0:
                    totals_s[rank] += seconds

    def on_heartbeats(self, beats: Heartbeats) -> None:
        self.beats |= dict.fromkeys(beats.ranks, beats)

    def traffic(self) -> defaultdict[str, float]:
        """The sums over all ranks since the run began, by name."""
        totals = self.departed_traffic.copy()
        _add_traffic(self.reports, totals)
        return totals
