"""The spread of some numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Count, sum, minimum and maximum of some numbers."""

    count: int
    total: float
    low: float
    high: float

    @property
    def mean(self) -> float:
        return self.total / self.count

    def __add__(self, other: Spread) -> Spread:
        low, high = min(self.low, other.low), max(self.high, other.high)
        return Spread(self.count + other.count, self.total + other.total, low, high)
