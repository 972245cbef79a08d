"""A unit's layout: its parameters concatenated in a flat buffer that is cut into equal shards.

All sizes are in elements, never bytes, so that a unit's model weights, main weights, gradients and
optimizer state share one layout whatever their dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod

# Every parameter and every shard starts at a multiple of this many elements: 64 bytes in bf16,
# 128 in fp32, the alignment that vectorised kernels and NCCL prefer.
ALIGN_NUMEL = 32


@dataclass(frozen=True)
class ParamSpec:
    """A parameter in a layout. `group` is its optimizer parameter group."""

    name: str
    shape: tuple[int, ...]
    group: int = 0

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class ParamRange:
    """Elements `start` to `stop` of parameter `index`. `memory` is their place in a part of the
    flat buffer, relative to the part."""

    index: int
    start: int
    stop: int
    memory: slice


@dataclass(frozen=True)
class UnitLayout:
    """The layout of one unit for one world size: a pure function of its fields.

    `params` are in buffer order: sorted by optimizer group, so that a group is contiguous.
    """

    name: str
    params: tuple[ParamSpec, ...]
    world_size: int

    def for_world_size(self, world_size: int) -> UnitLayout:
        """Returns the layout for another world size. The parameters keep their offsets; only the
        padding at the end and the shards differ."""
        return self if world_size == self.world_size else replace(self, world_size=world_size)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The start of each parameter in the flat buffer."""
        sizes = (round_up(spec.numel) for spec in self.params)
        return tuple(accumulate(sizes, initial=0))[:-1]

    @cached_property
    def shard_numel(self) -> int:
        """The length of one rank's shard; the same on every rank, padding included."""
        used = sum(round_up(spec.numel) for spec in self.params)
        return round_up(-(-used // self.world_size))

    @property
    def numel(self) -> int:
        """The length of the flat buffer."""
        return self.shard_numel * self.world_size

    @property
    def logical_numel(self) -> int:
        """The number of elements of all parameters, without padding."""
        return sum(spec.numel for spec in self.params)

    def shard(self, rank: int) -> slice:
        """Returns one rank's contiguous part of the flat buffer."""
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def param_range(self, index: int) -> slice:
        """Returns one parameter's part of the flat buffer."""
        start = self.offsets[index]
        return slice(start, start + self.params[index].numel)

    @cached_property
    def padding(self) -> tuple[slice, ...]:
        """The padding: parts of the flat buffer that belong to no parameter."""
        edges = [self.param_range(index) for index in range(len(self.params))]
        starts = [0] + [edge.stop for edge in edges]
        stops = [edge.start for edge in edges] + [self.numel]
        return tuple(
            slice(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop
        )

    def overlaps(self, within: slice) -> Iterator[ParamRange]:
        """Yields the parameters' elements in `within`, a part of the buffer, in buffer order."""
        for index in range(len(self.params)):
            extent = self.param_range(index)
            start, stop = max(extent.start, within.start), min(extent.stop, within.stop)
            if start < stop:
                memory = slice(start - within.start, stop - within.start)
                yield ParamRange(index, start - extent.start, stop - extent.start, memory)

    def group_ranges(self, within: slice) -> Iterator[tuple[int, slice]]:
        """Yields (optimizer group, range relative to `within`) of each group in `within`.

        The ranges are disjoint and cover `within`: padding belongs to the group before it.
        """
        first: dict[int, int] = {}
        for spec, offset in zip(self.params, self.offsets, strict=True):
            first.setdefault(spec.group, offset)
        starts = list(first.values())
        for group, start, stop in zip(first, starts, [*starts[1:], self.numel], strict=True):
            start, stop = max(start, within.start), min(stop, within.stop)
            if start < stop:
                yield group, slice(start - within.start, stop - within.start)


def round_up(numel: int) -> int:
    """Rounds up to a multiple of `ALIGN_NUMEL`."""
    return -(-numel // ALIGN_NUMEL) * ALIGN_NUMEL


def make_layout(name: str, params: Sequence[ParamSpec], world_size: int) -> UnitLayout:
    """Returns the layout of a unit whose parameters were registered in this order."""
    return UnitLayout(name, tuple(sorted(params, key=lambda spec: spec.group)), world_size)
