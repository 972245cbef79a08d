"""Records that combine messages of several workers: reports of a step, heartbeats, others."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TypeAlias

from rayzero.workers.messages import Heartbeat, RankMessage, StepReport, WorkerMessage


@dataclass(frozen=True)
class StepRows:
    """The reports of one step by some workers, with the same gauges. The tuples have an entry for
    each worker. Made where reports come together, so that a controller handles one object.

    Args:
        packed_names: names of the gauges, in the order of a report; pickled, since they are nearly
            always those of the previous record.
        values: all gauges of the first report, of the second... as float64 of this machine.
    """

    generation: int
    step: int
    workers: tuple[int, ...]
    ranks: tuple[int, ...]
    packed_names: bytes = field(repr=False)
    values: bytes = field(repr=False)
    counters: tuple[dict[str, float], ...]
    at_s: tuple[float, ...]

    @cached_property
    def numbers(self) -> array[float]:
        """The gauges in `values`."""
        return array("d", self.values)

    @cached_property
    def positions(self) -> dict[str, int]:
        """The position of each name in a report's gauges."""
        return _positions(self.packed_names)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.positions)

    def column(self, name: str, default: float = 0.0) -> Sequence[float]:
        """Returns that gauge of each report; `default` if the reports do not have it."""
        if (position := self.positions.get(name)) is None:
            return [default] * len(self.workers)
        return self.numbers[position :: len(self.positions)]

    @cached_property
    def own_s(self) -> list[float]:
        """The seconds that each rank itself took, without its waits for other ranks."""
        pairs = zip(self.column("step_s"), self.column("exposed_comm_s"), strict=True)
        return [max(0.0, step_s - exposed_s) for step_s, exposed_s in pairs]

    def gauge(self, row: int, name: str) -> float | None:
        """Returns a gauge of one report; None if the reports do not have it."""
        position = self.positions.get(name)
        return None if position is None else self.numbers[row * len(self.positions) + position]

    def gauges(self, row: int) -> dict[str, float]:
        """Returns all gauges of one report."""
        width = len(self.positions)
        numbers = self.numbers[row * width : (row + 1) * width]
        return dict(zip(self.positions, numbers, strict=True))

    @property
    def messages(self) -> list[StepReport]:
        """The reports, by worker. Slow: reports of thousands of workers are read by columns."""
        return [
            StepReport(self.generation, rank, self.step, counters, self.gauges(row), at_s)
            for row, (rank, counters, at_s) in enumerate(
                zip(self.ranks, self.counters, self.at_s, strict=True)
            )
        ]


@lru_cache(maxsize=64)
def _positions(packed_names: bytes) -> dict[str, int]:
    """Returns `StepRows.positions`. Cached, since thousands of reports share their names."""
    return {name: position for position, name in enumerate(pickle.loads(packed_names))}


def combine(workers: Sequence[int], reports: Sequence[StepReport]) -> StepRows:
    """Combines some workers' reports of the same step, with the same gauges."""
    first = reports[0]
    values = array("d")
    for report in reports:
        values.extend(report.gauges.values())
    return StepRows(
        first.generation,
        first.step,
        tuple(workers),
        tuple(report.rank for report in reports),
        pickle.dumps(tuple(first.gauges), pickle.HIGHEST_PROTOCOL),
        values.tobytes(),
        tuple(report.counters for report in reports),
        tuple(report.at_s for report in reports),
    )


@dataclass(frozen=True, eq=False)
class Heartbeats:
    """Heartbeats of some workers that arrived together, in columns as in `StepRows`."""

    workers: tuple[int, ...]
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    phases: tuple[str, ...]
    silent_s: tuple[float, ...]
    collectives: tuple[int, ...]
    waiting: tuple[bool, ...]

    def row(self, row: int) -> Heartbeat:
        """Returns the heartbeat in that row."""
        return Heartbeat(
            self.ranks[row],
            self.steps[row],
            self.phases[row],
            self.silent_s[row],
            self.collectives[row],
            self.waiting[row],
        )

    @property
    def messages(self) -> list[Heartbeat]:
        """The heartbeats, by worker."""
        return [*map(self.row, range(len(self.workers)))]


def combine_beats(workers: Sequence[int], beats: Sequence[Heartbeat]) -> Heartbeats:
    """Combines some workers' heartbeats."""
    return Heartbeats(tuple(workers), *zip(*beats, strict=True))


@dataclass(frozen=True)
class NodeMessages:
    """Other messages of some workers that arrived together, in their order."""

    workers: tuple[int, ...]
    messages: tuple[RankMessage, ...]


NodeRecord: TypeAlias = StepRows | NodeMessages | Heartbeats
"""Messages of several workers of a node."""
ReceivedMessage: TypeAlias = WorkerMessage | NodeRecord
"""What a controller receives."""
