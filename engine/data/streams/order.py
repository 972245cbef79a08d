"""Computes which row of which block is at a position of a stream: integers only.

An epoch of a source is a permutation of its blocks, cut into windows of `window` blocks. The rows
of a window, block after block, are cut into as many strata as a step has rows. A step has one row
of each stratum, and the rows of a stratum are permuted. So a step has its share of each block. A
rank reads the same contiguous part of every step, so it reads the same contiguous part of a window:
only the blocks at the two ends of that part are read by another rank as well.

All permutations are those of `sampling.py`, so a position is found without the positions before it,
in O(blocks) memory. A stream is one source, or a mixture. Its positions are cut into groups of one
step's samples; in a group, the rows of a source are sorted by stratum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor, gcd

import numpy as np
from numpy.typing import NDArray

from rayzero.engine.data.sampling import Integers, SampleOrder
from rayzero.engine.data.streams.mixture import MixSchedule
from rayzero.engine.errors import DataError

_ROW_SEED = 0x5DEECE66D
"""Rows are permuted by another key than blocks."""
_STRATUM_ROWS = 64
"""The fewest rows of a stratum. A window that has fewer rows for each row of a step has fewer
strata."""
_GOLDEN = (5**0.5 - 1) / 2
_ROUNDING = 1e-6  # error of a share of a step, in strata
_PIECE = 1 << 16
"""Blocks that are permuted at a time: their temporary arrays stay in a core's cache."""
_CACHED_EPOCHS = 2  # a range may cross the end of an epoch
_CACHED_WINDOWS = 4
_CACHED_PIECES = 4
_POSITIONS = 1 << 12
"""Positions that are computed at a time: a call of numpy costs as much as thousands of rows."""
_SORTED = 1 << 13
"""Positions that are sorted at a time: larger arrays get new pages from the system each time."""


@dataclass(frozen=True)
class Places:
    """The rows at some positions. All arrays are int64, of shape (positions,).

    `turns` are the numbers of the blocks of a source in the order of their use, over all epochs. A
    window has `window` turns, the last window of an epoch fewer. `numbers` are the numbers of the
    samples: a source has a contiguous range, in the order of its rows.
    """

    sources: Integers
    turns: Integers
    blocks: Integers
    rows: Integers
    numbers: Integers

    def __getitem__(self, indices: slice) -> Places:
        return Places(*(column[indices] for column in vars(self).values()))


@dataclass(frozen=True)
class _Epoch:
    blocks: Integers  # in the order of their use
    starts: Integers  # the position of each block's first row, then the epoch's end


@dataclass(frozen=True)
class _Window:
    """A window, and the strata into which it is cut.

    Attributes:
        start: the position of its first row, over all epochs.
        turn: the turn of its first block.
        block_starts: the first row of each block, then the number of rows.
        stride: the difference between the strata of two adjacent positions.
        stratum_starts: the first row of each stratum, then the number of rows.
    """

    number: int
    start: int
    turn: int
    blocks: Integers
    block_starts: Integers
    stride: int
    stratum_starts: Integers

    @property
    def rows(self) -> int:
        return int(self.block_starts[-1])

    @property
    def end(self) -> int:
        return self.start + self.rows

    @property
    def strata(self) -> int:
        """Number of strata."""
        return len(self.stratum_starts) - 1

    def strata_of(self, positions: Integers) -> Integers:
        return positions % self.strata * self.stride % self.strata


class BlockOrder:
    """The order of one source, epoch after epoch: each epoch has each row exactly once.

    Args:
        counts: number of rows of each block.
        seed: any integer.
        window: number of blocks whose rows are mixed.
        strata: the most strata of a window: the number of rows of a step.

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
        self._window = lru_cache(maxsize=_CACHED_WINDOWS)(self._compute_window)

    def spread(self, start: int, count: int) -> NDArray[np.float64]:
        """Returns, for each position from `start` to `start + count - 1`, where its stratum is in
        the window: from 0 to below 1."""
        parts = []
        for window in self._windows_of(start, start + count):
            positions = np.arange(max(start, window.start), min(start + count, window.end))
            parts.append(window.strata_of(positions) / window.strata)
        return np.concatenate(parts)

    def locate(self, positions: Integers) -> tuple[Integers, Integers, Integers]:
        """Returns (turns, blocks, rows) of one or more positions, in any sequence. The time is
        proportional to the number of positions, and of the windows between them."""
        turns, blocks, rows = (np.empty_like(positions) for _ in range(3))
        for window in self._windows_of(int(positions.min()), int(positions.max()) + 1):
            own = np.flatnonzero((positions >= window.start) & (positions < window.end))
            turns[own], blocks[own], rows[own] = self._locate_in_window(window, positions[own])
        return turns, blocks, rows

    def window_of(self, turn: int) -> int:
        """Returns the window of a block's turn, counted over all epochs."""
        epoch, within = divmod(turn, len(self.counts))
        return epoch * self._windows + within // self.window

    def window_start(self, window: int) -> int:
        """Returns the position of a window's first row."""
        return self._window(window).start

    def blocks_of_window(self, window: int, begin: float, end: float) -> list[int]:
        """Returns the blocks of a window that have rows of the part of each step from `begin` to
        `end`, which are fractions of the step; in the order of the blocks' use."""
        cut = self._window(window)
        begin_row = cut.stratum_starts[floor(begin * cut.strata + _ROUNDING)]
        end_row = cut.stratum_starts[ceil(end * cut.strata - _ROUNDING)]
        slots = (cut.block_starts[:-1] < end_row) & (cut.block_starts[1:] > begin_row)
        return [int(block) for block in cut.blocks[slots]]

    def _windows_of(self, start: int, end: int) -> Iterator[_Window]:
        """Yields the windows with positions from `start` to `end - 1`."""
        epoch, position = divmod(start, self.length)
        turn = int(np.searchsorted(self._epoch(epoch).starts, position, side="right")) - 1
        number = epoch * self._windows + turn // self.window
        while start < end:
            window = self._window(number)
            yield window
            start = window.end
            number += 1

    def _locate_in_window(
        self, window: _Window, positions: Integers
    ) -> tuple[Integers, Integers, Integers]:
        strata = window.strata_of(positions)
        keys = (window.number * window.strata + strata).astype(np.uint64)
        within = ((positions - window.start) // window.strata).astype(np.uint64)
        rows = window.stratum_starts[strata]
        sizes = window.stratum_starts[strata + 1] - rows
        # A stratum has one of two sizes, which may be equal.
        for length in {window.rows // window.strata, -(-window.rows // window.strata)}:
            own = np.flatnonzero(sizes == length)
            rows[own] += SampleOrder(length, self._row_seed).permute(keys[own], within[own])
        slots = np.searchsorted(window.block_starts, rows, side="right") - 1
        return window.turn + slots, window.blocks[slots], rows - window.block_starts[slots]

    def _compute_window(self, number: int) -> _Window:
        """Computes a window. The stride is the number of strata divided by the golden ratio, so any
        run of positions is spread evenly over the strata, also if a source of a mixture has more or
        fewer rows in a step than there are strata."""
        epoch, within = divmod(number, self._windows)
        layout, first = self._epoch(epoch), within * self.window
        starts = layout.starts[first : first + self.window + 1]
        blocks = layout.blocks[first : first + self.window].copy()  # a view keeps the whole epoch
        start, size = epoch * self.length + int(starts[0]), int(starts[-1] - starts[0])
        strata = max(1, self.strata // -(-self.strata * _STRATUM_ROWS // size))
        stride = round(strata * _GOLDEN)
        while gcd(stride, strata) != 1:
            stride += 1
        sizes = np.full(strata, size // strata)
        sizes[(start + np.arange(size % strata)) % strata * stride % strata] += 1
        stratum_starts = np.append(0, np.cumsum(sizes))
        turn = epoch * len(self.counts) + first
        return _Window(number, start, turn, blocks, starts - starts[0], stride, stratum_starts)

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


class StreamOrder:
    """The order of the samples of a stream.

    Attributes:
        length: samples of an epoch.

    Args:
        orders: the order of each source.
        schedule: the schedule of a mixture; None: there is one source.
        group: number of samples of a step, which are sorted by stratum.
    """

    def __init__(
        self, orders: Sequence[BlockOrder], schedule: MixSchedule | None, group: int
    ) -> None:
        self.orders = orders
        self.group = group
        self.length = orders[0].length if schedule is None else schedule.length
        self._schedule = schedule
        lengths = [order.length for order in orders]
        self._offsets = np.cumsum(lengths, dtype=np.int64) - lengths
        self._part = range(group)
        self._piece = lru_cache(maxsize=_CACHED_PIECES)(self._compute_piece)

    def choose_part(self, first: int, last: int) -> None:
        """Announces that samples from `first` to `last - 1` of each group are read from now on.
        `places` computes only these, and whole groups if another position is asked for."""
        self._part = range(first, last)

    def places(self, start: int, count: int) -> Places:
        """Returns the rows at the positions `start` to `start + count - 1`."""
        group, first = divmod(start, self.group)
        is_in_part = first in self._part and first + count <= self._part.stop
        part = self._part if is_in_part else range(self.group)
        groups = self._groups_of_piece(part)
        begin, end = group // groups, (start + count - 1) // self.group // groups
        skipped = (group % groups) * len(part) + first - part.start
        pieces = [self._piece(number, part) for number in range(begin, end + 1)]
        if len(pieces) == 1:
            return pieces[0][skipped : skipped + count]
        columns = (vars(piece).values() for piece in pieces)
        whole = Places(*(np.concatenate(column) for column in zip(*columns, strict=True)))
        return whole[skipped : skipped + count]

    def indices(self, start: int, count: int) -> Integers:
        """Returns the numbers of the samples at these positions, as `SampleOrder.indices`."""
        return self.places(start, count).numbers

    def _groups_of_piece(self, part: range) -> int:
        """Returns how many groups are computed at a time: thousands of rows of one window."""
        most = min(order.window_rows for order in self.orders)
        return max(1, min(_POSITIONS // len(part), min(_SORTED, most) // self.group))

    def _compute_piece(self, number: int, part: range) -> Places:
        """Computes the rows of a part of each group of a piece. Of the samples outside the part,
        only the strata are computed, because the rows of a group are sorted by stratum."""
        groups = self._groups_of_piece(part)
        start, count = number * groups * self.group, groups * self.group
        slots = (np.arange(0, count, self.group)[:, np.newaxis] + np.array(part)).ravel()
        if self._schedule is None:
            sources, positions = np.zeros(count, dtype=np.int64), np.arange(start, start + count)
        else:
            sources, positions = self._schedule.split(start, count)
        part_sources = sources[slots]
        turns, blocks, rows, numbers = (np.empty(len(slots), dtype=np.int64) for _ in range(4))
        sorted_positions = np.empty(count, dtype=np.int64)
        for source in map(int, np.flatnonzero(np.bincount(part_sources))):
            order = self.orders[source]
            of_source = np.flatnonzero(sources == source)
            first = int(positions[of_source[0]])
            by_place = _sort_by_group(of_source // self.group, order.spread(first, len(of_source)))
            sorted_positions[of_source] = first + by_place
            own = np.flatnonzero(part_sources == source)
            turns[own], blocks[own], rows[own] = order.locate(sorted_positions[slots[own]])
            numbers[own] = self._offsets[source] + order.first_rows[blocks[own]] + rows[own]
        return Places(part_sources, turns, blocks, rows, numbers)


def _sort_by_group(groups: Integers, places: NDArray[np.float64]) -> Integers:
    """Returns the indices that sort by (group, place, index). Sorts one integer for each, which is
    several times faster than a sort by columns. Places are from 0 to below 1."""
    index_bits = len(groups).bit_length()
    place_bits = 62 - index_bits - int(groups[-1]).bit_length()
    keys = (groups << place_bits) + (places * (1 << place_bits)).astype(np.int64)
    keys = (keys << index_bits) + np.arange(len(groups))
    keys.sort()
    return keys & ((1 << index_bits) - 1)
