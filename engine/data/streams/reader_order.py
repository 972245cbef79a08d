"""Which row of which reader is at a position, where a fixed number of readers take turns: integers
only.

Position p is row `p // R` of reader `p % R`, as long as all R readers have rows; then the turns go
over those that still have some, to the end of the epoch. So the order is a function of the position
and of the rows of each reader, and of no number of ranks.

As in `order.py`, a step has the samples of its positions, sorted by reader. Ranks read contiguous
ranges of it: a reader is one rank's, or, where the ranges do not end with a reader's rows, that of
two. It is the same one's in each step if the samples of a step are a multiple of the readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from rayzero.engine.data.sampling import Integers
from rayzero.engine.errors import DataError

ENDLESS_ROWS = 1 << 60
"""Of all readers together, where nobody says how many rows an epoch has."""
_CACHED_GROUPS = 4


class ReaderOrder:
    """The order of the rows of `readers` readers.

    Attributes:
        rows: int64, shape (readers,): those of each in an epoch.
        length: samples of an epoch.
        group: samples that are sorted by reader; those of a step.

    Args:
        rows: None: the readers have no end.

    Raises:
        DataError: no reader has a row.
    """

    def __init__(self, readers: int, rows: Sequence[int] | None, group: int) -> None:
        own = [ENDLESS_ROWS // readers] * readers if rows is None else rows
        self.rows = np.array(own, dtype=np.int64)
        self.length = int(self.rows.sum())
        self.group = group
        if not self.length:
            raise DataError(f"{readers} readers have no rows", "one row or more", "rows")
        # The readers that take turns change where one has no more rows: at these rows of a reader,
        self._levels = np.unique(np.append(self.rows, 0))[:-1]
        # from these positions of an epoch on, to these readers.
        self._begins = np.array([np.minimum(self.rows, it).sum() for it in self._levels])
        self._active = [np.flatnonzero(self.rows > it) for it in self._levels]
        self._group = lru_cache(maxsize=_CACHED_GROUPS)(self._compute_group)

    def places(self, start: int, count: int) -> tuple[Integers, Integers]:
        """(readers, rows) at the positions `start` to `start + count - 1`, int64, shape (count,).
        Rows are counted over all epochs, and grow with the position for each reader."""
        groups = range(start // self.group, (start + count - 1) // self.group + 1)
        parts = [self._group(number) for number in groups]
        first = start - groups.start * self.group
        readers, rows = (np.concatenate(column) for column in zip(*parts, strict=True))
        return readers[first : first + count], rows[first : first + count]

    def rows_before(self, position: int) -> Integers:
        """The number of each reader's rows before a position, int64, shape (readers,)."""
        first = position // self.group * self.group
        epoch, within = divmod(first, self.length)
        segment = int(np.searchsorted(self._begins, within, side="right")) - 1
        active = self._active[segment]
        turns, left = divmod(within - int(self._begins[segment]), len(active))
        counts: Integers = np.minimum(self.rows, self._levels[segment] + turns)
        counts[active[:left]] += 1
        counts += epoch * self.rows
        if position > first:
            readers, _ = self.places(first, position - first)
            counts += np.bincount(readers, minlength=len(counts))
        return counts

    def numbers(self, readers: Integers, rows: Integers) -> Integers:
        """The numbers of samples, the same in each epoch: reader `number % R`, row
        `number // R`."""
        return rows % self.rows[readers] * len(self.rows) + readers

    def indices(self, start: int, count: int) -> Integers:
        """The numbers of the samples at these positions, as `SampleOrder.indices`."""
        return self.numbers(*self.places(start, count))

    def _compute_group(self, number: int) -> tuple[Integers, Integers]:
        positions = np.arange(number * self.group, (number + 1) * self.group)
        epochs, within = np.divmod(positions, self.length)
        segments = np.searchsorted(self._begins, within, side="right") - 1
        readers, rows = (np.empty(self.group, dtype=np.int64) for _ in range(2))
        for segment in np.unique(segments):
            own = np.flatnonzero(segments == segment)
            active = self._active[segment]
            turns, left = np.divmod(within[own] - self._begins[segment], len(active))
            readers[own] = active[left]
            rows[own] = self._levels[segment] + turns
        rows += epochs * self.rows[readers]
        by_reader = np.argsort(readers, kind="stable")
        return readers[by_reader], rows[by_reader]
