"""Which row of which block is at a position of a stream: integers only.

An epoch of a source is a permutation of its blocks, cut into windows of `window` blocks. The rows
of a window, block after block, are cut into as many strata as a step has rows; a step has one row
of each, and the rows of a stratum are permuted. So a step has its share of each block, and a rank,
which reads the same contiguous part of every step, reads the same contiguous part of a window: of
the blocks, only those at its two ends are read by another rank as well.

All permutations are that of `sampling.py`, so a position is found without those before it, in
O(blocks) memory. A stream is one source, or a mixture. Its positions are cut into groups of one
step's samples; in a group, the rows of a source are sorted by stratum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor, gcd
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rayzero.engine.data.sampling import SampleOrder
from rayzero.engine.errors import DataError

Integers = NDArray[np.int64]

_ROW_SEED = 0x5DEECE66D
"""Rows are permuted by another key than blocks."""
_STRATUM_ROWS = 64
"""The fewest rows of a stratum: of a window with fewer for each row of a step, several are one."""
_GOLDEN = (5**0.5 - 1) / 2
_ROUNDING = 1e-6  # of a share of a step, in strata
_PIECE = 1 << 16
"""Blocks that are permuted at a time: their temporary arrays stay in a core's cache."""
_CACHED_EPOCHS = 2  # of a range that crosses the end of one
_CACHED_PIECES = 4
_POSITIONS = 1 << 12
"""Positions that are computed at a time: the cost of numpy's calls is that of thousands of rows."""


@dataclass(frozen=True)
class Places:
    """The rows at some positions. All int64, shape (positions,).

    `turns` counts a source's blocks in the order of their use, over all epochs. A window is
    `window` of them, the last one of an epoch fewer.
    """

    sources: Integers
    turns: Integers
    blocks: Integers
    rows: Integers

    def take(self, indices: Integers | slice) -> Places:
        return Places(
            self.sources[indices], self.turns[indices], self.blocks[indices], self.rows[indices]
        )


@dataclass(frozen=True)
class _Epoch:
    blocks: Integers  # in the order of their use
    starts: Integers  # the position of each one's first row, then the epoch's end


class BlockOrder:
    """The order of one source, epoch after epoch: each row exactly once in each.

    Args:
        counts: the rows of each block.
        seed: any integer.
        window: number of blocks whose rows are mixed.
        strata: of a window, at most: the rows of a step.

    Raises:
        DataError: there are no blocks, or one is empty.
    """

    def __init__(self, counts: Integers, seed: int, window: int, strata: int) -> None:
        self.counts = np.asarray(counts, dtype=np.int64)
        if not len(self.counts) or self.counts.min() < 1:
            seen = f"{len(self.counts)} blocks, {int((self.counts < 1).sum())} of them without rows"
            raise DataError(seen, "one block or more, each with one row or more", "check the data")
        self.window = window
        self.strata = strata
        self.length = int(self.counts.sum())
        self.first_rows = np.cumsum(self.counts) - self.counts
        self._windows = -(-len(self.counts) // window)
        self.window_rows = self.length // self._windows  # on average
        self._row_seed = seed ^ _ROW_SEED
        self._block_order = SampleOrder(len(self.counts), seed)
        self._epoch = lru_cache(maxsize=_CACHED_EPOCHS)(self._compute_epoch)

    def locate(
        self, start: int, count: int
    ) -> tuple[NDArray[np.float64], Integers, Integers, Integers]:
        """(places, turns, blocks, rows) of the positions `start` to `start + count - 1`. A place is
        that of the stratum in its window, from 0 to below 1."""
        parts: list[tuple[NDArray[np.float64], Integers, Integers, Integers]] = []
        while count > 0 or not parts:
            epoch, position = divmod(start, self.length)
            part = self._locate_in_window(epoch, position, count)
            parts.append(part)
            start += len(part[0])
            count -= len(part[0])
        places, turns, blocks, rows = (
            np.concatenate(column) for column in zip(*parts, strict=True)
        )
        return places, turns, blocks, rows

    def window_of(self, turn: int) -> int:
        """The window of a block's turn, counted over all epochs."""
        epoch, within = divmod(turn, len(self.counts))
        return epoch * self._windows + within // self.window

    def window_start(self, window: int) -> int:
        """The position of its first row."""
        epoch, within = divmod(window, self._windows)
        layout, first, _ = self._bounds(epoch, within)
        return epoch * self.length + int(layout.starts[first])

    def blocks_of_window(self, window: int, begin: float, end: float) -> list[int]:
        """The blocks with the rows from one share of a step to another one, in their order."""
        epoch, within = divmod(window, self._windows)
        layout, first, last = self._bounds(epoch, within)
        starts = layout.starts[first : last + 1] - layout.starts[first]
        _, ends = self._cut(self.window_start(window), int(starts[-1]))
        number = len(ends) - 1
        begin_row = ends[floor(begin * number + _ROUNDING)]
        end_row = ends[ceil(end * number - _ROUNDING)]
        slots = (starts[:-1] < end_row) & (starts[1:] > begin_row)
        return [int(block) for block in layout.blocks[first:last][slots]]

    def _locate_in_window(
        self, epoch: int, position: int, count: int
    ) -> tuple[NDArray[np.float64], Integers, Integers, Integers]:
        """The same, up to the end of the window."""
        starts = self._epoch(epoch).starts
        turn = int(np.searchsorted(starts, position, side="right")) - 1
        within = turn // self.window
        layout, first, last = self._bounds(epoch, within)
        begin = int(starts[first])
        size = int(starts[last]) - begin
        numbers = np.arange(position - begin, min(position - begin + count, size))
        stride, ends = self._cut(epoch * self.length + begin, size)
        number = len(ends) - 1
        strata = (epoch * self.length + begin + numbers) % number * stride % number
        window = epoch * self._windows + within
        keys = (window * number + strata).astype(np.uint64)
        rows = begin + ends[strata]
        sizes = ends[strata + 1] - ends[strata]
        each = numbers // number
        for length in {size // number, -(-size // number)}:
            own = np.flatnonzero(sizes == length)
            order = SampleOrder(length, self._row_seed)
            rows[own] += order.permute(keys[own], each[own].astype(np.uint64))
        turns = np.searchsorted(starts[first : last + 1], rows, side="right") - 1 + first
        rows -= starts[turns]
        return strata / number, turns + epoch * len(self.counts), layout.blocks[turns], rows

    def _cut(self, position: int, size: int) -> tuple[int, Integers]:
        """The strata of a window that begins at a position: the stride from that of one position to
        that of the next, and the first row of each, then the window's end.

        Any run of positions is spread evenly over the strata, because the stride is theirs divided
        by the golden ratio: a source's part of a step may be more or fewer rows than them.
        """
        number = max(1, self.strata // -(-self.strata * _STRATUM_ROWS // size))
        stride = round(number * _GOLDEN)
        while gcd(stride, number) != 1:
            stride += 1
        sizes = np.full(number, size // number)
        sizes[(position + np.arange(size % number)) % number * stride % number] += 1
        return stride, np.append(0, np.cumsum(sizes))

    def _bounds(self, epoch: int, within: int) -> tuple[_Epoch, int, int]:
        """An epoch, and the turns in it of the first block of a window and of the next window."""
        first = within * self.window
        return self._epoch(epoch), first, min(first + self.window, len(self.counts))

    def _compute_epoch(self, epoch: int) -> _Epoch:
        number = len(self.counts)
        pieces = [
            self._block_order.indices(epoch * number + begin, min(_PIECE, number - begin))
            for begin in range(0, number, _PIECE)
        ]
        blocks = np.concatenate(pieces)
        starts = np.zeros(number + 1, dtype=np.int64)
        np.cumsum(self.counts[blocks], out=starts[1:])
        return _Epoch(blocks, starts)


class Schedule(Protocol):
    """Which source of a mixture is at a position."""

    length: int

    def split(self, start: int, count: int) -> tuple[Integers, Integers]:
        """The sources at `start` to `start + count - 1`, and the position of each in its source,
        which grow by one from sample to sample of a source."""
        ...


class StreamOrder:
    """The order of the samples of a stream.

    Attributes:
        length: samples of an epoch.

    Args:
        schedule: of a mixture; None: there is one source.
        group: samples that are sorted by stratum; those of a step.
    """

    def __init__(self, orders: Sequence[BlockOrder], schedule: Schedule | None, group: int) -> None:
        self.orders = orders
        self.group = group
        self.length = orders[0].length if schedule is None else schedule.length
        self._schedule = schedule
        lengths = [order.length for order in orders]
        self._offsets = np.cumsum(lengths, dtype=np.int64) - lengths
        most = min(_POSITIONS, *(order.window_rows for order in orders))
        self._piece = group * max(1, most // group)
        self._groups = lru_cache(maxsize=_CACHED_PIECES)(self._compute_groups)

    def places(self, start: int, count: int) -> Places:
        """The rows at the positions `start` to `start + count - 1`."""
        parts = []
        for number in range(start // self._piece, (start + count - 1) // self._piece + 1):
            first = number * self._piece
            part = slice(max(0, start - first), min(self._piece, start + count - first))
            parts.append(self._groups(number).take(part))
        if len(parts) == 1:
            return parts[0]
        return Places(
            sources=np.concatenate([part.sources for part in parts]),
            turns=np.concatenate([part.turns for part in parts]),
            blocks=np.concatenate([part.blocks for part in parts]),
            rows=np.concatenate([part.rows for part in parts]),
        )

    def indices(self, start: int, count: int) -> Integers:
        """The numbers of the samples at these positions, as `SampleOrder.indices`."""
        return self.numbers(self.places(start, count))

    def numbers(self, places: Places) -> Integers:
        """The number of each row: those of a source are adjacent, in its own order."""
        numbers = self._offsets[places.sources] + places.rows
        for source, order in enumerate(self.orders):
            of_source = places.sources == source
            numbers[of_source] += order.first_rows[places.blocks[of_source]]
        return numbers

    def _compute_groups(self, number: int) -> Places:
        start = number * self._piece
        if self._schedule is None:
            sources = np.zeros(self._piece, dtype=np.int64)
            positions = np.arange(start, start + self._piece)
        else:
            sources, positions = self._schedule.split(start, self._piece)
        turns, blocks, rows = (np.empty(self._piece, dtype=np.int64) for _ in range(3))
        for source in np.unique(sources):
            own = np.flatnonzero(sources == source)
            places, *located = self.orders[source].locate(int(positions[own[0]]), len(own))
            by_place = _sort_by_group(own // self.group, places)
            for target, values in zip((turns, blocks, rows), located, strict=True):
                target[own] = values[by_place]
        return Places(sources, turns, blocks, rows)


def _sort_by_group(groups: Integers, places: NDArray[np.float64]) -> Integers:
    """The indices that sort by (group, place, index): as one integer each, which is several times
    faster than a sort by columns. Places are from 0 to below 1."""
    index_bits = len(groups).bit_length()
    place_bits = 62 - index_bits - int(groups[-1]).bit_length()
    keys = (groups << place_bits) + (places * (1 << place_bits)).astype(np.int64)
    keys = (keys << index_bits) + np.arange(len(groups))
    keys.sort()
    return keys & ((1 << index_bits) - 1)
