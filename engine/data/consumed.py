"""The set of the prompts that were trained on, of a log of rollouts. Imports no torch, because the
buffer of rollouts uses it, too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rayzero.engine.errors import DataError

SAMPLES_PHASE = "samples"
"""The phase of a rank that waits for samples that others make."""
OUTSIDE_PHASE = "outside"
"""The phase of a rank that runs the function's own code: between two steps, and after a batch, an
evaluation's forward, or a backward."""


@dataclass(frozen=True)
class Consumed:
    """A set of prompt numbers, counted from 0 over all epochs: all numbers below `frontier`, and
    `extras`, which are above it."""

    frontier: int = 0
    extras: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return self.frontier + len(self.extras)

    def __contains__(self, number: int) -> bool:
        return number < self.frontier or number in self.extras

    def add(self, numbers: Iterable[int]) -> Consumed:
        """Returns the set with `numbers` added. Raises DataError if it has one of them already."""
        extras, frontier = set(self.extras), self.frontier
        for number in numbers:
            if number < frontier or number in extras:
                raise DataError(f"prompt {number} is in the log of rollouts twice")
            extras.add(number)
        while frontier in extras:
            extras.remove(frontier)
            frontier += 1
        return Consumed(frontier, frozenset(extras))
