"""The reports of one step by several workers in one record."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TypeAlias

from rayzero.workers.messages import StepReport, WorkerMessage


@dataclass(frozen=True)
class StepRows:
    """The reports of one step by some workers, with the same gauges: columns, each with an entry
    for each worker. Made where reports come together, so that a controller handles one object.

    Args:
        names: of the gauges, in the order of a report's.
        values: the gauges of the first report, of the second... as float64 of this machine.
    """

    generation: int
    step: int
    workers: tuple[int, ...]
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    values: bytes = field(repr=False)
    counters: tuple[dict[str, float], ...]
    at_s: tuple[float, ...]

    @cached_property
    def numbers(self) -> list[float]:
        """The values."""
        return [*array("d", self.values)]

    @cached_property
    def reports(self) -> tuple[StepReport, ...]:
        """The reports, by worker."""
        names, numbers = _shared(self.names), self.numbers
        width = len(names)
        return tuple(
            StepReport(
                self.generation,
                rank,
                self.step,
                counters,
                dict(zip(names, numbers[row * width : (row + 1) * width], strict=True)),
                at_s,
            )
            for row, (rank, counters, at_s) in enumerate(
                zip(self.ranks, self.counters, self.at_s, strict=True)
            )
        )


@lru_cache(maxsize=64)
def _shared(names: tuple[str, ...]) -> tuple[str, ...]:
    """The first tuple that is equal to this one: thousands of reports share their names."""
    return names


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
        tuple(first.gauges),
        values.tobytes(),
        tuple(report.counters for report in reports),
        tuple(report.at_s for report in reports),
    )


ReceivedMessage: TypeAlias = WorkerMessage | StepRows
"""What a controller receives."""
