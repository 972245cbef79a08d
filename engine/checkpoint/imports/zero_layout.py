"""Where DeepSpeed's flat partitions hold which part of which parameter. Pure integers.

Stages 1 and 2: a group's parameters stand behind one another in one flat tensor, which is cut into
as many partitions as there are ranks. Stage 3: every parameter is cut into equal parts, the last
one padded, and a rank's parts of all parameters stand behind one another. Either way a sequence of
stretches lies in a sequence of flat tensors whose boundaries need not be the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from rayzero.engine.errors import DataError
from rayzero.engine.state.table import Range


@dataclass(frozen=True)
class Stretch:
    """Elements `start` to `stop` of a parameter, and padding up to `length` elements."""

    name: str
    start: int
    stop: int
    length: int

    def content(self, start: int, stop: int) -> tuple[int, int]:
        """The parameter's elements in places `start` to `stop` of the stretch."""
        return min(self.start + start, self.stop), min(self.start + stop, self.stop)


def rank_stretch(name: str, numel: int, rank: int, world_size: int) -> Stretch:
    """A rank's part of a parameter at stage 3."""
    length = -(-numel // world_size)
    start, stop = (min(edge * length, numel) for edge in (rank, rank + 1))
    return Stretch(name, start, stop, length)


def cut(stretches: Sequence[Stretch], lengths: Sequence[int], slack: int = 0) -> list[list[Range]]:
    """What lies in each of the flat tensors; offsets are counted in elements.

    Args:
        lengths: elements of each flat tensor, in order.
        slack: so many elements may be left over at the end.

    Raises:
        DataError: the stretches do not fill the flat tensors, so this is not how they were cut.
    """
    wanted, held = sum(one.length for one in stretches), sum(lengths)
    if not wanted <= held <= wanted + slack:
        raise DataError(
            f"the partitions hold {held} elements, the parameters need {wanted}",
            allowed="a checkpoint that all of its ranks wrote, of a version that is known here",
        )
    ranges: list[list[Range]] = [[] for _ in lengths]
    ends = list(accumulate(lengths))
    flat = at = 0
    for one in stretches:
        done = 0
        while done < one.length:
            take = min(one.length - done, ends[flat] - at)
            start, stop = one.content(done, done + take)
            if start < stop:
                offset = at - (ends[flat] - lengths[flat])
                ranges[flat].append(Range(one.name, start, stop, offset))
            done, at = done + take, at + take
            if at == ends[flat]:
                flat += 1
    return ranges
