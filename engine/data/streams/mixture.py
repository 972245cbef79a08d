"""Mixtures of sources by weights: which source is at a position, in O(1). Integers only.

Weights are shares of a period of at most 65,536 samples. Samples are assigned to sources as tasks
of a fixed rate: sample j of a source with w of the D samples of a period is scheduled between
floor(j D / w) and ceil((j + 1) D / w), the earliest deadline first. One processor meets all of
these deadlines (Baruah et al. 1996, "Proportionate progress"), so each source has its share of
every prefix to within one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush
from math import gcd, lcm

import numpy as np

from rayzero.engine.data.sampling import Integers, divide_by_shares
from rayzero.engine.errors import ConfigError

_LONGEST_PERIOD = 1 << 16


class Cycle:
    """The sources of the samples of one period, which repeats.

    Raises ConfigError if no weight is positive, or one is negative or too small for a period.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.shares = np.array(_whole_weights(weights), dtype=np.int64)
        self.period = int(self.shares.sum())
        self._sources = self._assign()
        # The places of each source's samples in the period.
        self._by_source = [np.flatnonzero(self._sources == i) for i in range(len(weights))]
        self._ranks = np.empty(self.period, dtype=np.int64)
        for places in self._by_source:
            self._ranks[places] = np.arange(len(places))

    def split(self, positions: Integers) -> tuple[Integers, Integers]:
        """Returns the source at each position, and the number of its samples before that."""
        periods, within = np.divmod(positions, self.period)
        sources = self._sources[within]
        return sources, periods * self.shares[sources] + self._ranks[within]

    def counts(self, position: int) -> Integers:
        """Returns the number of samples of each source before a position."""
        periods, within = divmod(position, self.period)
        part = np.bincount(self._sources[:within], minlength=len(self.shares))
        return periods * self.shares + part

    def end_of(self, source: int, count: int) -> int:
        """Returns the position after the first `count` samples of a source; `count` is positive."""
        periods, within = divmod(count - 1, int(self.shares[source]))
        return periods * self.period + int(self._by_source[source][within]) + 1

    def _assign(self) -> Integers:
        """Returns the source of each sample of a period. A task is (deadline, source, number)."""
        released: list[list[tuple[int, int, int]]] = [[] for _ in range(self.period + 1)]
        for source, share in enumerate(self.shares.tolist()):
            if share:
                released[0].append((-(-self.period // share), source, 0))
        ready: list[tuple[int, int, int]] = []
        sources = np.empty(self.period, dtype=np.int64)
        for position in range(self.period):
            for task in released[position]:
                heappush(ready, task)
            _, source, number = heappop(ready)
            sources[position] = source
            share, number = int(self.shares[source]), number + 1
            if number < share:
                due = -(-(number + 1) * self.period // share)
                release = max(position + 1, number * self.period // share)
                released[release].append((due, source, number))
        return sources


def _whole_weights(weights: Sequence[float]) -> list[int]:
    """Returns the weights as integers without a common divisor, whose sum is the period. Rounds
    them if their period would be longer than the longest one."""
    parts = [Fraction(str(weight)) for weight in weights]
    if not parts or min(parts) < 0 or not sum(parts):
        raise ConfigError(
            f"the weights {tuple(weights)} of a mixture", "none negative, one or more positive"
        )
    scale = lcm(*(part.denominator for part in parts))
    whole = [int(part * scale) for part in parts]
    divisor = gcd(*whole)
    whole = [weight // divisor for weight in whole]
    if sum(whole) <= _LONGEST_PERIOD:
        return whole
    rounded = list(divide_by_shares(_LONGEST_PERIOD, whole))
    for weight, share in zip(weights, rounded, strict=True):
        if weight and not share:
            raise ConfigError(
                f"weight {weight} of a mixture, of {float(sum(parts)):g} together",
                f"0, or 1/{_LONGEST_PERIOD} of all weights or more",
            )
    return rounded


@dataclass(frozen=True)
class _Phase:
    """The positions from one change of the weights to the next."""

    start: int
    counts: Integers  # the samples of each source before it
    cycle: Cycle


class MixSchedule:
    """The sources of the samples of a mixture, whose weights may change.

    A source has no more samples after its limit: the others share by their weights. If all sources
    have limits, an epoch of the mixture ends when all are reached; in the next one each source has
    as many samples again, and continues where it was. Otherwise an epoch of the mixture is as long
    as one epoch of each source together.

    Args:
        lengths: samples of an epoch of each source.
        weights: {position: the weights from there on}; the first position is 0.
        limits: the most samples of each source; None: its epochs repeat.

    Raises:
        ConfigError: see `Cycle`; or only sources of weight 0 are left.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        weights: Mapping[int, Sequence[float]],
        limits: Sequence[int | None],
    ) -> None:
        self._limits = limits
        self._phases: list[_Phase] = []
        self._total: int | None = None  # samples of an epoch, if all sources have limits
        changes = sorted(weights.items())
        position, counts = 0, np.zeros(len(lengths), dtype=np.int64)
        while True:
            current = [shares for start, shares in changes if start <= position][-1]
            has_more = [
                limit is None or count < limit for limit, count in zip(limits, counts, strict=True)
            ]
            if not any(has_more):
                self._total = position
                break
            active = [weight if more else 0 for weight, more in zip(current, has_more, strict=True)]
            phase = _Phase(position, counts, Cycle(active))
            self._phases.append(phase)
            ends = [start for start, _ in changes if start > position] + self._limit_ends(phase)
            if not ends:
                break
            counts = counts + phase.cycle.counts(min(ends) - position)
            position = min(ends)
        self._starts = np.array([phase.start for phase in self._phases], dtype=np.int64)
        self.length = sum(lengths) if self._total is None else self._total

    def split(self, start: int, count: int) -> tuple[Integers, Integers]:
        """Returns the sources at `start` to `start + count - 1`, and the position of each sample in
        its source. The positions of a source grow by one from sample to sample."""
        positions = np.arange(start, start + count, dtype=np.int64)
        epochs = np.zeros(count, dtype=np.int64)
        if self._total is not None:
            epochs, positions = np.divmod(positions, self._total)
        sources, own = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        numbers = np.searchsorted(self._starts, positions, side="right") - 1
        for number in np.unique(numbers):
            phase, part = self._phases[number], numbers == number
            sources[part], ranks = phase.cycle.split(positions[part] - phase.start)
            own[part] = ranks + phase.counts[sources[part]]
        if self._total is not None:
            own += epochs * np.array(self._limits, dtype=np.int64)[sources]
        return sources, own

    def _limit_ends(self, phase: _Phase) -> list[int]:
        """Returns the position after the last sample of each source that has a limit."""
        return [
            phase.start + phase.cycle.end_of(source, limit - int(phase.counts[source]))
            for source, limit in enumerate(self._limits)
            if limit is not None and phase.cycle.shares[source]
        ]
