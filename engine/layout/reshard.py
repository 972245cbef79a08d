"""The reshard plan: the source of every wanted element. Integers only.

Used for a live resize, recovery from replicas and loading a checkpoint. N blocks of bytes hold
ranges of logical tensors in any partition, and a target needs ranges of another partition. Neither
side needs to know the stage or world size of the other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from rayzero.engine.errors import EngineError
from rayzero.engine.layout.state_index import TensorRange


@dataclass(frozen=True)
class RangeCopy:
    """Elements `start` to `stop` of a logical tensor, to be copied from a source to a target.

    Attributes:
        source: index of the block that holds the elements.
        held, wanted: the ranges that contain the elements in the source and in the target.
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
    """Some wanted elements have no source."""


class HeldRanges:
    """The ranges that several sources hold, by tensor. If several sources hold the same range, it
    is read from the first one.

    Args:
        held: the ranges of each source.
    """

    def __init__(self, held: Sequence[Iterable[TensorRange]]) -> None:
        self._by_name: defaultdict[str, list[tuple[int, TensorRange]]] = defaultdict(list)
        for source, ranges in enumerate(held):
            for part in ranges:
                self._by_name[part.name].append((source, part))
        self._pieces: dict[str, list[_Piece]] = {}

    def plan(self, wanted: Iterable[TensorRange]) -> list[RangeCopy]:
        """Returns copies with exactly one source for every element of `wanted`, whose ranges are
        disjoint. Raises MissingRangesError if elements have no source."""
        copies: list[RangeCopy] = []
        gaps: list[str] = []
        for target in wanted:
            end = target.start  # of the elements that have a source
            for copy in _find_sources(target, self._pieces_of(target.name)):
                if end < copy.start:
                    gaps.append(f"{target.name}[{end}:{copy.start}]")
                copies.append(copy)
                end = copy.stop
            if end < target.stop:
                gaps.append(f"{target.name}[{end}:{target.stop}]")
        if gaps:
            more = f" and {len(gaps) - 5} more" if len(gaps) > 5 else ""
            raise MissingRangesError(
                f"the state is incomplete: no source holds {', '.join(gaps[:5])}{more}"
            )
        return copies

    def _pieces_of(self, name: str) -> list[_Piece]:
        if name not in self._pieces:
            self._pieces[name] = _drop_overlaps(self._by_name.get(name, []))
        return self._pieces[name]


def plan_copies(
    wanted: Iterable[TensorRange], held: Sequence[Iterable[TensorRange]]
) -> list[RangeCopy]:
    """Returns and raises as `HeldRanges.plan`. Linear in the number of ranges, plus sorting."""
    return HeldRanges(held).plan(wanted)


_Piece = tuple[int, int, int, TensorRange]  # start, stop, source, the source's range


def _find_sources(target: TensorRange, pieces: list[_Piece]) -> Iterator[RangeCopy]:
    """Yields copies from the pieces of a tensor that overlap `target`, in order."""
    first = max(0, bisect_right(pieces, target.start, key=itemgetter(0)) - 1)
    for start, stop, source, held in pieces[first:]:
        if start >= target.stop:
            return
        start, stop = max(start, target.start), min(stop, target.stop)
        if start < stop:
            yield RangeCopy(source, held, target, start, stop)


def _drop_overlaps(parts: list[tuple[int, TensorRange]]) -> list[_Piece]:
    """Returns disjoint pieces in order. An overlap is read from the range that begins first, and
    among equal starts from the source with the smallest index.

    One sweep over the sorted starts. Overlapping ranges are usually replicas of each other.
    """
    pieces: list[_Piece] = []
    covered = 0
    for source, held in sorted(parts, key=lambda part: (part[1].start, part[0], -part[1].stop)):
        start = max(held.start, covered)
        if start < held.stop:
            pieces.append((start, held.stop, source, held))
            covered = held.stop
    return pieces
