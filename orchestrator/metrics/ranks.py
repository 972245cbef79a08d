"""What each rank of the newest generation said last, and what all of them add up to. Pure."""

from __future__ import annotations

from collections import defaultdict
from copy import copy
from dataclasses import dataclass, field

from rayzero.workers.messages import Heartbeat, Report

_TRAFFIC = "collectives/"


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


@dataclass
class Ranks:
    """A rank that a new generation no longer has is forgotten.

    Args:
        by_rank: those that said something.
        moved: calls and bytes by collective, of all ranks since the run began.
    """

    by_rank: defaultdict[int, Rank] = field(default_factory=lambda: defaultdict(Rank))
    moved: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))

    def begin(self, world_size: int) -> None:
        """There are so many from now on."""
        for rank in [rank for rank in self.by_rank if rank >= world_size]:
            del self.by_rank[rank]

    def copied(self) -> Ranks:
        """As they are now, whatever is told afterwards."""
        rows = {rank: copy(one) for rank, one in self.by_rank.items()}
        return Ranks(defaultdict(Rank, rows), self.moved.copy())

    def reported(self, report: Report) -> None:
        one = self.by_rank[report.rank]
        before = one.report.gauges if one.report is not None else {}
        if one.report is not None and one.report.generation != report.generation:
            before = {}  # an engine counts from its own beginning
        one.exposed_s += max(0.0, report.gauges.get("exposed_comm_s", 0.0))
        one.data_wait_s += max(0.0, report.gauges.get("phases/data", 0.0))
        for name, value in report.gauges.items():
            if name.startswith(_TRAFFIC):
                collective, what = name.removeprefix(_TRAFFIC).rsplit("/", 1)
                self.moved[what, collective] += max(0.0, value - before.get(name, 0.0))
        one.report = report

    def beats(self, beat: Heartbeat, node: str) -> None:
        one = self.by_rank[beat.rank]
        one.beat, one.node = beat, node

    def values(self, name: str) -> dict[int, float]:
        """What the ranks reported under that name last, by rank."""
        found = {rank: one.gauge(name) for rank, one in sorted(self.by_rank.items())}
        return {rank: value for rank, value in found.items() if value is not None}
