"""All-gather of sharded weights, quantized or from a secondary partition (hpZ)."""

from __future__ import annotations

import logging

from torch import Tensor

from rayzero.engine.comm.backend import ChainableWork, GatherOp, rank_chunk
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.compression.codecs import CODECS, Codec
from rayzero.engine.compression.quantized import PayloadBuffers
from rayzero.engine.errors import ConfigError
from rayzero.engine.zero.build_context import BuildContext
from rayzero.engine.zero.parameters import ShardedWeights, WeightGather

log = logging.getLogger("rayzero.engine")


class QuantizedGather(WeightGather):
    """Quantizes weights before they are sent (Wang et al. 2023, "ZeRO++"). Every rank decodes all
    parts, also its own, so that all ranks compute with the same weights. Shards stay exact.
    """

    def __init__(self, codec: Codec, collectives: Collectives) -> None:
        super().__init__(collectives)
        self._codec = codec
        self._buffers = PayloadBuffers(collectives)

    def gather_op(self, unit: ShardedWeights) -> GatherOp:
        alone = self._collectives.world_size == 1  # nothing is sent, so nothing is rounded
        return self._collectives if unit.packed or alone else self

    def all_gather(self, full: Tensor, part: Tensor) -> ChainableWork:
        rank, world_size = self._collectives.rank, self._collectives.world_size
        nbytes = world_size * self._codec.payload_bytes(part.numel())
        base = self._buffers.acquire(nbytes)
        payload = base[:nbytes]
        payloads = payload.view(world_size, -1)
        self._codec.encode(part, payloads[rank])
        pending = self._collectives.all_gather(payload, payloads[rank])

        def decode() -> None:
            for encoded, values in zip(payloads, full.view(world_size, -1), strict=True):
                self._codec.decode(encoded, values, add=False)
            self._buffers.release(base, pending)

        return pending.then(decode)

    @property
    def buffer_bytes(self) -> int:
        return self._buffers.total_bytes


class HpzGather(WeightGather):
    """Keeps a secondary partition within every group of consecutive ranks ("ZeRO++", hpZ). After an
    update, a unit is gathered from all ranks once, and then only from the group.

    Args:
        inner: gathers units from all ranks.
        size: the number of ranks per group, which divides the world size.
    """

    def __init__(self, inner: WeightGather, collectives: Collectives, size: int) -> None:
        super().__init__(collectives)
        self._inner = inner
        first = collectives.rank // size * size
        self._group_ranks = range(first, first + size)
        self._secondary_shards: dict[int, _SecondaryShard] = {}

    def gather_op(self, unit: ShardedWeights) -> GatherOp:
        secondary = self._secondary_shards.get(id(unit))
        if secondary is None:
            numel = unit.layout.numel // len(self._group_ranks)
            shard = self._collectives.zeros(numel, unit.shard.dtype)
            inner = self._inner.gather_op(unit)
            secondary = _SecondaryShard(inner, self._collectives, self._group_ranks, shard)
            self._secondary_shards[id(unit)] = secondary
        return secondary

    def invalidate(self) -> None:
        for secondary in self._secondary_shards.values():
            secondary.is_current = False

    @property
    def secondary_bytes(self) -> int:
        return sum(secondary.shard.nbytes for secondary in self._secondary_shards.values())

    @property
    def buffer_bytes(self) -> int:
        return self._inner.buffer_bytes


class _SecondaryShard:
    """One unit's secondary shard. It is written after the unit was gathered from all ranks. No
    other rank reads it then, because a vote has followed all earlier reads.
    """

    def __init__(
        self, inner: GatherOp, collectives: Collectives, members: range, shard: Tensor
    ) -> None:
        self.shard = shard
        self.is_current = False
        self._inner = inner
        self._collectives = collectives
        self._group_ranks = members

    def all_gather(self, full: Tensor, part: Tensor) -> ChainableWork:
        if self.is_current:
            return self._collectives.all_gather_in_group(full, self.shard, self._group_ranks)

        def keep() -> None:
            index = self._group_ranks.index(self._collectives.rank)
            self.shard.copy_(rank_chunk(full, index, len(self._group_ranks)))
            self.is_current = True

        return self._inner.all_gather(full, part).then(keep)


def make_weight_gather(context: BuildContext) -> WeightGather:
    """Returns the all-gather of sharded weights that a config selects. Raises ConfigError if the
    size of hpZ groups does not divide the world size."""
    config, collectives = context.config, context.collectives
    zero, section = config.zero_optimization, config.rayzero.compression
    gather = WeightGather(collectives)
    if not context.stage.shards_weights:
        return gather
    if zero.zero_quantized_weights:
        gather = QuantizedGather(CODECS["int8"](section.block_size), collectives)
    size = hpz_group_size(
        zero.zero_hpz_partition_size, collectives.world_size, elastic=context.elastic
    )
    return gather if size == 1 else HpzGather(gather, collectives, size)


def hpz_group_size(size: int, world_size: int, *, elastic: bool) -> int:
    """Returns the number of ranks per secondary partition (ZeRO++ hpZ), 1 for none. Raises
    ConfigError if `size` does not divide the world size.

    Args:
        size: `zero_hpz_partition_size`. 0 or 1 for none.
        elastic: the world size may change. So the next smaller size that divides it is used, with
            a warning.
    """
    allowed = [divisor for divisor in range(1, world_size + 1) if world_size % divisor == 0]
    if size <= 1 or size in allowed:
        return max(size, 1)
    if not elastic:
        raise ConfigError(
            f"zero_optimization.zero_hpz_partition_size is {size} on {world_size} ranks",
            allowed=f"what divides the world size: {', '.join(map(str, allowed))}",
        )
    used = max(divisor for divisor in allowed if divisor < size)
    log.warning(
        "zero_hpz_partition_size %d does not divide the world size %d: %d is used until that "
        "changes",
        size,
        world_size,
        used,
    )
    return used
