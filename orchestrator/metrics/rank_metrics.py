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
"""Prefix of `collectives/NAME/bytes` and `collectives/NAME/calls`, which engines count."""


class RankReport(NamedTuple):
    """A rank's report of a step, as a row in the reports of several ranks."""

    rows: StepRows
    row: int

    def gauge(self, name: str) -> float | None:
        return self.rows.gauge(self.row, name)

    def gauges(self, prefix: str) -> dict[str, float | None]:
        """Returns the gauges whose names begin with `prefix`, sorted by name."""
        return {name: self.gauge(name) for name in _names_with(prefix, self.rows.names)}


class RankMetrics(NamedTuple):
    """The values of one rank.

    Args:
        report: report of the rank's last step in this generation.
        exposed_comm_s, data_wait_s: total time that workers with this rank number have waited for
            other ranks and for data.
    """

    report: RankReport | None
    beat: Heartbeat | None
    node: str
    exposed_comm_s: float
    data_wait_s: float

    def gauge(self, name: str) -> float | None:
        return self.report.gauge(name) if self.report is not None else None


class RankView(NamedTuple):
    """The ranks in order, and the sums of their traffic. Made once for all series of a scrape."""

    rows: list[tuple[int, RankMetrics]]
    traffic: Mapping[str, float]


@lru_cache(maxsize=64)
def _names_with(prefix: str, gauges: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the gauges whose names begin with `prefix`. Cached, because nearly all ranks report
    the same gauges, and each repair and scrape asks for all ranks."""
    return tuple(sorted(name for name in gauges if name.startswith(prefix)))


def _add_traffic(reports: Mapping[int, StepRows], totals: defaultdict[str, float]) -> None:
    """Adds the bytes that the engines of these ranks have communicated since they were built."""
    ranks: defaultdict[int, list[int]] = defaultdict(list)
    records = {id(rows): rows for rows in reports.values()}
    for rank, rows in reports.items():
        ranks[id(rows)].append(rank)
    for key, rows in records.items():
        positions = [*map(rows.ranks.index, ranks[key])]
        for name in _names_with(TRAFFIC_PREFIX, rows.names):
            column = rows.column(name)
            totals[name] += sum(max(0.0, column[position]) for position in positions)


@dataclass
class RankMetricsTable:
    """The ranks of the newest generation, in columns by rank. There may be thousands of ranks, and
    a reader copies the columns under the lock that the controller takes for each report.

    A report costs less than a microsecond. Engines count their traffic cumulatively, so an engine's
    last count is added only when the engine is replaced, and when the sums are read.

    Attributes:
        reports, beats: the record with the newest report or heartbeat of each rank.
        departed_traffic: traffic of engines that no longer exist.
    """

    nodes: dict[int, str] = field(default_factory=dict)
    reports: dict[int, StepRows] = field(default_factory=dict)
    beats: dict[int, Heartbeats] = field(default_factory=dict)
    exposed_comm_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    data_wait_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    departed_traffic: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def start_generation(self, nodes: Sequence[str]) -> None:
        """Begins a generation. Removes ranks that the new generation does not have.

        Args:
            nodes: the node of each rank.
        """
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
        previous = ((rank, self.reports.get(rank, rows)) for rank in rows.ranks)
        replaced = {rank: old for rank, old in previous if old.generation != rows.generation}
        if replaced:
            _add_traffic(replaced, self.departed_traffic)
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
        """Returns the traffic of all ranks since the run began, by name."""
        totals = self.departed_traffic.copy()
        _add_traffic(self.reports, totals)
        return totals
