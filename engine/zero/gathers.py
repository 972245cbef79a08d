"""How sharded weights are gathered: plain, as codes, or from a second, nearer set of shards.

One `WeightWay` a run, chosen in `factory`; it makes every unit's `Gathers`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from rayzero.engine.comm.code_buffers import CodeBuffers
from rayzero.engine.comm.codecs.codec import Codec
from rayzero.engine.comm.collectives import Collectives, Gathers, Pending, part_of
from rayzero.engine.comm.pending import Then
from rayzero.engine.zero.weights import ShardedWeights


class WeightWay(Protocol):
    """How a run's sharded weights travel."""

    def of(self, unit: ShardedWeights) -> Gathers:
        """What gathers a unit."""

    def invalidate(self) -> None:
        """Shards were updated: copies of what was gathered before are old."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of second shards."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that codes pass through."""


class PlainGathers:
    """Weights travel as they are."""

    kept_bytes = 0
    buffer_bytes = 0

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def of(self, unit: ShardedWeights) -> Gathers:
        return self._collectives

    def invalidate(self) -> None:
        return


class CodedGathers:
    """Weights travel as codes (Wang et al. 2023, "ZeRO++"). Every rank decodes all of them, its own
    too, so that all compute with the same weights; shards stay exact.
    """

    kept_bytes = 0

    def __init__(self, codec: Codec, collectives: Collectives, device: torch.device) -> None:
        self.rank = collectives.rank
        self.world_size = collectives.world_size
        self._codec = codec
        self._collectives = collectives
        self._buffers = CodeBuffers(collectives, device)

    def of(self, unit: ShardedWeights) -> Gathers:
        return self if unit.shard.is_floating_point() else self._collectives

    def invalidate(self) -> None:
        return

    def all_gather(self, full: Tensor, part: Tensor) -> Pending:
        nbytes = self.world_size * self._codec.coded_bytes(part.numel())
        base = self._buffers.take(nbytes)
        codes = base[:nbytes]
        own = part_of(codes, self.rank, self.world_size)
        self._codec.encode(part, own)
        pending = self._collectives.all_gather(codes, own)

        def decode() -> None:
            for rank in range(self.world_size):
                values = part_of(full, rank, self.world_size)
                self._codec.decode(part_of(codes, rank, self.world_size), values, add=False)
            self._buffers.give_back(base, pending)

        return Then(pending, decode)

    @property
    def buffer_bytes(self) -> int:
        return self._buffers.total_bytes


class NearGathers:
    """A second set of shards within every group of consecutive ranks: after an update a unit is
    gathered from all ranks once, and then from the group only ("ZeRO++", hierarchical partition).

    Args:
        inner: how units are gathered from all ranks.
        size: ranks in a group; it divides the world size.
    """

    def __init__(
        self, inner: WeightWay, collectives: Collectives, size: int, device: torch.device
    ) -> None:
        self._inner = inner
        self._collectives = collectives
        self._device = device
        first = collectives.rank // size * size
        self._members = range(first, first + size)
        self._units: dict[int, _NearUnit] = {}

    def of(self, unit: ShardedWeights) -> Gathers:
        known = self._units.get(id(unit))
        if known is None:
            numel = unit.layout.numel // len(self._members)
            second = self._collectives.zeros(numel, unit.shard.dtype, self._device)
            gathers = self._inner.of(unit)
            known = _NearUnit(gathers, self._collectives, self._members, second)
            self._units[id(unit)] = known
        return known

    def invalidate(self) -> None:
        self._inner.invalidate()
        for unit in self._units.values():
            unit.current = False

    @property
    def kept_bytes(self) -> int:
        return sum(unit.second.nbytes for unit in self._units.values())

    @property
    def buffer_bytes(self) -> int:
        return self._inner.buffer_bytes


class _NearUnit:
    """One unit's second shard. Written when the unit was gathered from all ranks, after the vote
    that followed all reads of it, so no other rank reads it then.
    """

    def __init__(
        self, inner: Gathers, collectives: Collectives, members: range, second: Tensor
    ) -> None:
        self.rank = collectives.rank
        self.world_size = collectives.world_size
        self.second = second
        self.current = False
        self._inner = inner
        self._collectives = collectives
        self._members = members

    def all_gather(self, full: Tensor, part: Tensor) -> Pending:
        if self.current:
            return self._collectives.all_gather_among(full, self.second, self._members)

        def keep() -> None:
            place = self.rank - self._members.start
            self.second.copy_(part_of(full, place, len(self._members)))
            self.current = True

        return Then(self._inner.all_gather(full, part), keep)
