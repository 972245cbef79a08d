"""Messages of several workers in one record: their reports of a step, and others."""

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
    """The reports of one step by some workers, with the same gauges: columns, each with an entry
    for each worker. Made where reports come together, so that a controller handles one object.

    Args:
        packed_names: of the gauges, in the order of a report's; pickled, since they are nearly
            always those of the record before.
        values: the gauges of the first report, of the second... as float64 of this machine.
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
        """The values."""
        return array("d", self.values)

    @cached_property
    def positions(self) -> dict[str, int]:
        """Where in each report's gauges a name is."""
        return _positions(self.packed_names)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.positions)

    def column(self, name: str, default: float = 0.0) -> Sequence[float]:
        """The gauge of each report; `default` if they do not have it."""
        if (position := self.positions.get(name)) is None:
            return [default] * len(self.workers)
        return self.numbers[position :: len(self.positions)]

    @cached_property
    def own_s(self) -> list[float]:
        """The seconds that each rank itself took: without those that it waited for others."""
        pairs = zip(self.column("step_s"), self.column("exposed_comm_s"), strict=True)
        return [max(0.0, step_s - exposed_s) for step_s, exposed_s in pairs]

    def gauge(self, row: int, name: str) -> float | None:
        """A gauge of one report; None if it does not have it."""
        position = self.positions.get(name)
        return None if position is None else self.numbers[row * len(self.positions) + position]

    def gauges(self, row: int) -> dict[str, float]:
        """All gauges of one report."""
        width = len(self.positions)
        numbers = self.numbers[row * width : (row + 1) * width]
        return dict(zip(self.positions, numbers, strict=True))

    @property
    def messages(self) -> list[StepReport]:
        """The reports, by worker. Slow: what thousands of workers send is read by columns."""
        return [
            StepReport(self.generation, rank, self.step, counters, self.gauges(row), at_s)
            for row, (rank, counters, at_s) in enumerate(
                zip(self.ranks, self.counters, self.at_s, strict=True)
            )
        ]


@lru_cache(maxsize=64)
def _positions(packed_names: bytes) -> dict[str, int]:
    """The same for all reports with these names: thousands of them share their names."""
    return {name: position for position, name in enumerate(pickle.loads(packed_names))}


def combine(workers: Sequence[int], reports: Sequence[StepReport]) -> StepRows:
    """One record of some workers' reports, of the same step, and with the same gauges."""
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
    """Heartbeats of some workers that came together: columns, as of `StepRows`."""

    workers: tuple[int, ...]
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    phases: tuple[str, ...]
    silent_s: tuple[float, ...]
    collectives: tuple[int, ...]
    waiting: tuple[bool, ...]

    def row(self, row: int) -> Heartbeat:
        """One of them."""
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
    """One record of some workers' heartbeats."""
    return Heartbeats(tuple(workers), *zip(*beats, strict=True))


@dataclass(frozen=True)
class NodeMessages:
    """Other messages of some workers that came together, in their order."""

    workers: tuple[int, ...]
    messages: tuple[RankMessage, ...]


NodeRecord: TypeAlias = StepRows | NodeMessages | Heartbeats
"""Messages of several workers of a node."""
ReceivedMessage: TypeAlias = WorkerMessage | NodeRecord
"""What a controller receives."""
