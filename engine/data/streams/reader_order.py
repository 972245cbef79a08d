"""Computes which row of which reader is at a position, for a fixed number of readers that take
turns: integers only.

Position p is row `p // R` of reader `p % R`, as long as all R readers have rows. Then the readers
that still have rows take turns, to the end of the epoch. So the order depends on the position and
the number of rows of each reader, but not on the number of ranks.

As in `order.py`, a step has the samples of its positions, sorted by reader, and ranks read
contiguous ranges of it. One rank reads a reader, or two if a range ends between the reader's rows.
The rank is the same in each step if the samples of a step are a multiple of the readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from rayzero.engine.data.sampling import Integers
from rayzero.engine.errors import DataError

ENDLESS_ROWS = 1 << 60
"""Rows of all readers together in an epoch, if the readers have no end."""
_CACHED_GROUPS = 4


class ReaderOrder:
    """The order of the rows of `readers` readers.

    Attributes:
        rows: int64, shape (readers,): the number of rows of each reader in an epoch.
        length: number of samples of an epoch.
        group: number of samples of a step, which are sorted by reader.

    Args:
        rows: the number of rows of each reader in an epoch; None: the readers have no end.

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
        # An epoch has segments, in each of which the same readers take turns. For each segment:
        # its first row of each of its readers, its first position in the epoch, and its readers.
        self._levels = np.unique(np.append(self.rows, 0))[:-1]
        self._begins = np.array([np.minimum(self.rows, level).sum() for level in self._levels])
        self._active = [np.flatnonzero(self.rows > level) for level in self._levels]
        self._group = lru_cache(maxsize=_CACHED_GROUPS)(self._compute_group)

    def places(self, start: int, count: int) -> tuple[Integers, Integers]:
        """Returns (readers, rows) at the positions `start` to `start + count - 1`, int64, shape
        (count,). Rows are counted over all epochs, and grow with the position for each reader."""
        groups = range(start // self.group, (start + count - 1) // self.group + 1)
        parts = [self._group(number) for number in groups]
        first = start - groups.start * self.group
        readers, rows = (np.concatenate(column) for column in zip(*parts, strict=True))
        return readers[first : first + count], rows[first : first + count]

    def rows_before(self, position: int) -> Integers:
        """Returns the number of each reader's rows before a position: int64, shape (readers,)."""
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
        """Returns the numbers of samples, which are the same in each epoch: `number % R` is the
        reader, `number // R` its row."""
        return rows % self.rows[readers] * len(self.rows) + readers

    def indices(self, start: int, count: int) -> Integers:
        """Returns the numbers of the samples at these positions, as `SampleOrder.indices`."""
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
