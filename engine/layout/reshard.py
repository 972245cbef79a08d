"""The reshard plan: the source of every wanted element. Integers only.

Used for a live resize, recovery from replicas and loading a checkpoint: N blocks of bytes hold
ranges of logical tensors in any partition, another block wants ranges in a different one, and
neither needs to know the other's stage or world size.
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
        source: index of the block that holds them.
        held, wanted: the ranges that contain them in the source and in the target.
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
    """Some wanted elements have no source. `gaps` has (name, start, stop) of each missing range."""

    def __init__(self, gaps: Sequence[tuple[str, int, int]]) -> None:
        some = ", ".join(f"{name}[{start}:{stop}]" for name, start, stop in gaps[:5])
        more = f" and {len(gaps) - 5} more" if len(gaps) > 5 else ""
        super().__init__(f"the state is incomplete: no source holds {some}{more}")
        self.gaps = tuple(gaps)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.gaps,)


def plan_copies(
    wanted: Iterable[TensorRange], held: Sequence[Iterable[TensorRange]]
) -> list[RangeCopy]:
    """Exactly one source for every wanted element. Linear in the number of ranges, plus sorting.

    Args:
        wanted: disjoint ranges.
        held: the ranges of each source. Where several hold an element, the first source is read.

    Raises:
        MissingRangesError: elements without a source.
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
    """For each logical tensor, disjoint ranges in order, each of one source."""

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
        """(source, range, start, stop) of the held parts of `wanted`, in order."""
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

    One sweep over the sorted starts; overlapping ranges are usually replicas of each other.
    """
    pieces: list[tuple[int, int, int, TensorRange]] = []
    covered = 0
    for source, one in sorted(parts, key=lambda part: (part[1].start, part[0], -part[1].stop)):
        start = max(one.start, covered)
        if start < one.stop:
            pieces.append((start, one.stop, source, one))
            covered = one.stop
    return pieces
