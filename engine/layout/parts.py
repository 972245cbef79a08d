"""Cuts a unit into parts: the same columns of every rank's shard.

A unit's flat buffer is a matrix whose row r is the shard of rank r. A part is a range of columns.
Reduce-scattering the parts one by one therefore leaves every rank with the same shard as reducing
the whole buffer, and needs a buffer of one part only. A parameter and a part overlap in at most
three segments, however many ranks there are: the rows in which the parameter covers all of the
part's columns, which form one strided block, and the parameter's first and last row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from rayzero.engine.layout.flat_layout import UnitLayout, round_up


@dataclass(frozen=True)
class Segment:
    """`rows` pieces of `width` elements that are in a range of the flat buffer and in a part.

    In the range the first piece begins at `start`, and the pieces are `stride` apart. In the part's
    buffer the first piece begins at `target`, and the pieces are adjacent."""

    start: int
    target: int
    rows: int
    width: int
    stride: int

    def in_source(self, flat: Tensor) -> Tensor:
        """Returns the segment's elements of `flat`, a flat and contiguous tensor of the range."""
        return self._view(flat, self.start, self.stride)

    def in_part(self, flat: Tensor) -> Tensor:
        """Returns the segment's elements of `flat`, the part's buffer."""
        return self._view(flat, self.target, self.width)

    def _view(self, flat: Tensor, start: int, stride: int) -> Tensor:
        if self.rows == 1:
            return flat[start : start + self.width]
        offset = int(flat.storage_offset()) + start
        return flat.as_strided((self.rows, self.width), (stride, 1), offset)


def cut_columns(layout: UnitLayout, max_numel: int) -> list[slice]:
    """Returns the column ranges of parts of about equal length. A part has at most `max_numel`
    elements, padding not included. The ranges are the same on every rank."""
    count = -(-layout.logical_numel // max_numel)
    width = round_up(-(-layout.shard_numel // count))
    starts = range(0, layout.shard_numel, width)
    return [slice(start, min(start + width, layout.shard_numel)) for start in starts]


def segments(layout: UnitLayout, extent: slice, columns: slice) -> Iterator[Segment]:
    """Yields the segments in which `extent`, a range of the flat buffer, overlaps `columns` of a
    part. Their `start` is relative to the range, their `target` to the part's buffer."""
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
