"""Gradients whose sums rest in host memory: fetched as they arrive, beside the rest of backward.

They are summed over the ranks where they are, on the device; what comes to the host is this rank's
part of the sum. In gradient accumulation the host adds where sums rest sharded.
"""

from __future__ import annotations

from torch import Tensor

from rayzero.engine.comm.collectives import Collectives, Pending, Sums, part_of
from rayzero.engine.layout.partition import UnitLayout
from rayzero.engine.offload.link import Copy, Link
from rayzero.engine.offload.place import Place
from rayzero.engine.zero.grads import GradSlots, PartialGrads, ShardedGrads
from rayzero.engine.zero.placement import Collective


class FetchedPartialGrads(PartialGrads):
    """The whole unit on the device for good, as without offload; the owned sum in host memory."""

    def __init__(
        self,
        layout: UnitLayout,
        flat: Tensor,
        owned: slice,
        how: Collective,
        host: Tensor,
        link: Link,
    ) -> None:
        super().__init__(layout, flat, owned, how)
        self.host = host
        self._start = owned.start
        self._link = link

    def reduce(self, sums: Sums, *, first: bool) -> Pending:
        summed = super().reduce(sums, first=first)
        return self._link.fetch(summed, Copy(self._own, self.host, False, _at_once(sums)))

    def owned(self) -> Tensor:
        return self.host

    def counted(self, shard: slice) -> Tensor:
        self._link.land()
        return self.host[shard.start - self._start : shard.stop - self._start]

    @property
    def resting(self) -> dict[Place, Tensor]:
        return super().resting | {Place.HOST: self.host}


class FetchedShardedGrads(ShardedGrads):
    """This rank's shard of the sum in host memory; the device has the slots only."""

    def __init__(self, layout: UnitLayout, host: Tensor, slots: GradSlots, link: Link) -> None:
        super().__init__(layout, host, slots)
        self.host = host
        self._link = link

    def _sum(self, sums: Sums, full: Tensor, *, first: bool) -> Pending:
        own = part_of(full, sums.rank, sums.world_size)
        summed = sums.reduce_scatter(full, own)
        return self._link.fetch(summed, Copy(own, self.host, not first, _at_once(sums)))

    def counted(self, shard: slice) -> Tensor:
        self._link.land()
        return self.host

    @property
    def resting(self) -> dict[Place, Tensor]:
        return {Place.HOST: self.host}


def _at_once(sums: Sums) -> bool:
    return isinstance(sums, Collectives)
