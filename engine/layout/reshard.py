"""The reshard plan: which held range every wanted element comes from. Pure integers.

One plan serves a live resize, a repair from replicas, and a checkpoint's load: N blocks of bytes
hold ranges of logical tensors in any cut, one more wants others, and neither cut has to know the
other's stage or world size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rayzero.engine.errors import EngineError
from rayzero.engine.layout.state_index import TensorRange


@dataclass(frozen=True)
class RangeCopy:
    """Elements `start` to `stop` of the logical tensor that both ranges are of.

    Attributes:
        source: which of the blocks holds them.
        held, wanted: the ranges they are part of there and here.
    """

    source: int
    held: TensorRange
    wanted: TensorRange
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


class MissingRangesError(EngineError):
    """Some wanted elements are held nowhere. `gaps` has (name, start, stop) of each run of them."""

    def __init__(self, gaps: Sequence[tuple[str, int, int]]) -> None:
        some = ", ".join(f"{name}[{start}:{stop}]" for name, start, stop in gaps[:5])
        more = f" and {len(gaps) - 5} more" if len(gaps) > 5 else ""
        super().__init__(f"the state is incomplete: nobody holds {some}{more}")
        self.gaps = tuple(gaps)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.gaps,)


def plan_copies(
    wanted: Iterable[TensorRange], held: Sequence[Iterable[TensorRange]]
) -> list[RangeCopy]:
    """A source for every wanted element, exactly one. Linear in ranges but for sorting.

    Args:
        wanted: disjoint ranges.
        held: the ranges of each source. Where several hold an element, the first source is read.

    Raises:
        MissingRangesError: elements are held nowhere.
    """
    index = _HeldRanges(held)
    copies: list[RangeCopy] = []
    gaps: list[tuple[str, int, int]] = []
    for one in wanted:
        at = one.start
        for source, part, start, stop in index.overlaps(one):
            if at < start:
                gaps.append((one.name, at, start))
            copies.append(RangeCopy(source, part, one, start, stop))
            at = stop
        if at < one.stop:
            gaps.append((one.name, at, one.stop))
    if gaps:
        raise MissingRangesError(gaps)
    return copies


class _HeldRanges:
    """For each logical tensor, disjoint pieces in order, each of one source."""

    def __init__(self, held: Sequence[Iterable[TensorRange]]) -> None:
        by_name: defaultdict[str, list[tuple[int, TensorRange]]] = defaultdict(list)
        for source, ranges in enumerate(held):
            for one in ranges:
                by_name[one.name].append((source, one))
        self._ranges = {name: _drop_overlaps(parts) for name, parts in by_name.items()}
        self._starts = {
            name: [start for start, _, _, _ in pieces] for name, pieces in self._ranges.items()
        }

    def overlaps(self, wanted: TensorRange) -> Iterator[tuple[int, TensorRange, int, int]]:
        """(source, range, start, stop) of what is held of `wanted`, in order."""
        pieces = self._ranges.get(wanted.name, [])
        first = max(0, bisect_right(self._starts.get(wanted.name, []), wanted.start) - 1)
        for start, stop, source, one in pieces[first:]:
            if start >= wanted.stop:
                return
            start, stop = max(start, wanted.start), min(stop, wanted.stop)
            if start < stop:
                yield source, one, start, stop


def _drop_overlaps(parts: list[tuple[int, TensorRange]]) -> list[tuple[int, int, int, TensorRange]]:
    """(start, stop, source, range), disjoint and in order; the smaller source wins an overlap.

    Copies of a range are the usual overlap, so what is left of a range after the ones before it is
    found in one sweep over the sorted starts.
    """
    pieces: list[tuple[int, int, int, TensorRange]] = []
    covered = 0
    for source, one in sorted(parts, key=lambda part: (part[1].start, part[0], -part[1].stop)):
        start = max(one.start, covered)
        if start < one.stop:
            pieces.append((start, one.stop, source, one))
            covered = one.stop
    return pieces
