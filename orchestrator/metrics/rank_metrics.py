"""The newest values of each rank of the newest generation, and their sums. No clock, no I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from rayzero.workers.messages import Heartbeat
from rayzero.workers.step_rows import StepRows

TRAFFIC_PREFIX = "collectives/"
"""Of `collectives/NAME/bytes` and `collectives/NAME/calls`, which engines count."""


@dataclass
class RankMetrics:
    """One rank. `rows` has the report of its last step in this generation, in that `row`;
    `exposed_comm_s` and `data_wait_s` are the total waits for other ranks and for data under this
    rank number."""

    rows: StepRows | None = None
    row: int = 0
    beat: Heartbeat | None = None
    node: str = ""
    exposed_comm_s: float = 0.0
    data_wait_s: float = 0.0

    def gauge(self, name: str) -> float | None:
        return self.rows.gauge(self.row, name) if self.rows is not None else None

    def gauges(self) -> dict[str, float]:
        return self.rows.gauges(self.row) if self.rows is not None else {}

    def add_traffic(self, totals: defaultdict[str, float]) -> None:
        """Adds the bytes that this rank's engine has communicated since it was built."""
        if self.rows is not None:
            for name in _traffic_names(self.rows.names):
                totals[name] += max(0.0, self.gauge(name) or 0.0)


@lru_cache(maxsize=64)
def _traffic_names(gauges: tuple[str, ...]) -> tuple[str, ...]:
    """Nearly all ranks report the same gauges, and each repair asks all of them."""
    return tuple(name for name in gauges if name.startswith(TRAFFIC_PREFIX))


@dataclass
class RankMetricsTable:
    """The ranks of the newest generation. `departed_traffic` is that of engines that no longer
    exist.

    A report costs about a microsecond: engines count their traffic cumulatively, so it suffices to
    add an engine's last count when it is replaced, and when the sums are read.
    """

    by_rank: defaultdict[int, RankMetrics] = field(default_factory=lambda: defaultdict(RankMetrics))
    departed_traffic: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def start_generation(self, nodes: Sequence[str]) -> None:
        """A generation of these nodes, by rank; ranks that it does not have are removed."""
        for rank in [rank for rank in self.by_rank if rank >= len(nodes)]:
            self.by_rank.pop(rank).add_traffic(self.departed_traffic)
        for rank, node in enumerate(nodes):
            self.by_rank[rank].node = node

    def copy(self) -> RankMetricsTable:
        """A copy, in the order of the ranks."""
        rows = {rank: replace(metrics) for rank, metrics in sorted(self.by_rank.items())}
        return RankMetricsTable(defaultdict(RankMetrics, rows), self.departed_traffic.copy())

    def on_rows(self, rows: StepRows) -> None:
        waits = zip(rows.column("exposed_comm_s"), rows.column("phases/data"), strict=True)
        for row, (rank, (exposed_s, data_wait_s)) in enumerate(zip(rows.ranks, waits, strict=True)):
            metrics = self.by_rank[rank]
            if metrics.rows is not None and metrics.rows.generation != rows.generation:
                metrics.add_traffic(self.departed_traffic)
            metrics.exposed_comm_s += max(0.0, exposed_s)
            metrics.data_wait_s += max(0.0, data_wait_s)
            metrics.rows = rows
            metrics.row = row

    def on_heartbeat(self, beat: Heartbeat) -> None:
        self.by_rank[beat.rank].beat = beat

    def traffic(self) -> defaultdict[str, float]:
        """The sums over all ranks since the run began, by name."""
        totals = self.departed_traffic.copy()
        for metrics in self.by_rank.values():
            metrics.add_traffic(totals)
        return totals
