"""Cuts a unit into parts: the same columns of every rank's shard.

A unit's flat buffer is a matrix of one row for each rank: its shard. A part is a range of columns,
so reduce-scattering parts one by one leaves every rank with the same shard as reducing all at once,
and needs a buffer of one part only. A parameter meets a part in few segments, however many ranks
there are: whole rows in between, which form one strided block, and at most two partial rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from rayzero.engine.layout.flat_layout import UnitLayout, round_up


@dataclass(frozen=True)
class Segment:
    """`rows` pieces of `width` elements: of a range of the flat buffer, where they begin at `start`
    and are `stride` apart, and of a part's buffer, where they begin at `target` and are adjacent
    rows."""

    start: int
    target: int
    rows: int
    width: int
    stride: int

    def in_source(self, flat: Tensor) -> Tensor:
        """The elements in a flat, contiguous tensor of the range."""
        return self._view(flat, self.start, self.stride)

    def in_part(self, flat: Tensor) -> Tensor:
        """The elements in the part's buffer."""
        return self._view(flat, self.target, self.width)

    def _view(self, flat: Tensor, start: int, stride: int) -> Tensor:
        if self.rows == 1:
            return flat[start : start + self.width]
        offset = int(flat.storage_offset()) + start
        return flat.as_strided((self.rows, self.width), (stride, 1), offset)


def cut_columns(layout: UnitLayout, max_numel: int) -> list[slice]:
    """Column ranges of parts of about equal length, of at most `max_numel` elements without
    padding. The same on every rank."""
    count = -(-layout.logical_numel // max_numel)
    width = round_up(-(-layout.shard_numel // count))
    starts = range(0, layout.shard_numel, width)
    return [slice(start, min(start + width, layout.shard_numel)) for start in starts]


def segments(layout: UnitLayout, extent: slice, columns: slice) -> Iterator[Segment]:
    """Yields where a range of the flat buffer meets the columns of a part; starts are relative to
    the range, targets to the part's buffer."""
    shard, width = layout.shard_numel, columns.stop - columns.start
    if width == shard:  # the part is the whole buffer
        numel = extent.stop - extent.start
        yield Segment(0, extent.start, 1, numel, numel)
        return
    first, last = extent.start // shard, (extent.stop - 1) // shard
    full = range(
        -((columns.start - extent.start) // shard), (extent.stop - columns.stop) // shard + 1
    )
    if full:
        start = full[0] * shard + columns.start - extent.start
        yield Segment(start, full[0] * width, len(full), width, shard)
    for row in sorted({first, last} - set(full)):
        base = row * shard
        start = max(extent.start, base + columns.start)
        stop = min(extent.stop, base + columns.stop)
        if start < stop:
            target = row * width + start - base - columns.start
            yield Segment(start - extent.start, target, 1, stop - start, stop - start)
