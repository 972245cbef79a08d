"""What each rank of the newest generation said last, and what all of them add up to. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from rayzero.workers.messages import Heartbeat, Report

_TRAFFIC = "collectives/"
_NOTHING: Mapping[str, float] = {}

Moved = defaultdict[tuple[str, str], float]
"""By (bytes or calls, collective)."""


@dataclass
class Rank:
    """One rank.

    Args:
        report: of its last step in this generation; None before the first.
        node: where it lives; empty before its first heartbeat.
        exposed_s, data_wait_s: waited for peers and for data since it has this number.
    """

    report: Report | None = None
    beat: Heartbeat | None = None
    node: str = ""
    exposed_s: float = 0.0
    data_wait_s: float = 0.0

    def gauge(self, name: str) -> float | None:
        return self.report.gauges.get(name) if self.report is not None else None

    def copied(self) -> Rank:
        return Rank(self.report, self.beat, self.node, self.exposed_s, self.data_wait_s)

    def add_traffic(self, moved: Moved) -> None:
        """Adds what its engine has moved so far."""
        gauges = self.report.gauges if self.report is not None else _NOTHING
        for name, which in _traffic(tuple(gauges)):
            moved[which] += max(0.0, gauges[name])


@dataclass
class Ranks:
    """A rank that a new generation no longer has is forgotten.

    A report costs about a microsecond: engines count their traffic from their beginning, so it is
    enough to add the last count of each when an engine goes, and when somebody wants to know.

    Args:
        by_rank: those that said something.
        gone: calls and bytes by collective, of engines that are gone.
    """

    by_rank: defaultdict[int, Rank] = field(default_factory=lambda: defaultdict(Rank))
    gone: Moved = field(default_factory=lambda: defaultdict(float))

    def begin(self, world_size: int) -> None:
        """There are so many from now on."""
        for rank in [rank for rank in self.by_rank if rank >= world_size]:
            self.by_rank.pop(rank).add_traffic(self.gone)

    def copied(self) -> Ranks:
        """As they are now, whatever is told afterwards."""
        rows = {rank: one.copied() for rank, one in self.by_rank.items()}
        return Ranks(defaultdict(Rank, rows), self.gone.copy())

    def reported(self, report: Report) -> None:
        one, gauges = self.by_rank[report.rank], report.gauges
        if one.report is not None and one.report.generation != report.generation:
            one.add_traffic(self.gone)
        if (exposed_s := gauges.get("exposed_comm_s", 0.0)) > 0:
            one.exposed_s += exposed_s
        if (data_wait_s := gauges.get("phases/data", 0.0)) > 0:
            one.data_wait_s += data_wait_s
        one.report = report

    def beats(self, beat: Heartbeat, node: str) -> None:
        one = self.by_rank[beat.rank]
        one.beat, one.node = beat, node

    def moved(self) -> Moved:
        """Calls and bytes by collective, of all ranks since the run began."""
        moved = self.gone.copy()
        for one in self.by_rank.values():
            one.add_traffic(moved)
        return moved


@lru_cache(maxsize=256)
def _traffic(names: tuple[str, ...]) -> tuple[tuple[str, tuple[str, str]], ...]:
    """Those of some gauges that count traffic, each with what it counts. Every rank reports the
    same ones."""
    found = []
    for name in names:
        if name.startswith(_TRAFFIC):
            collective, what = name.removeprefix(_TRAFFIC).rsplit("/", 1)
            found.append((name, (what, collective)))
    return tuple(found)
