"""Communication of 1-bit Adam (Tang et al. 2021): gradients in the warm-up, then momenta as signs.

All ranks have the same momentum m of the previous step. Each computes its own next one from its own
gradient, and these are reduced as signs with error feedback, as gradients are with the sign codec.
The result is everyone's next momentum; the optimizer gets the gradient that leads to it.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from rayzero.engine.comm.backend import ChainableWork, ReduceOp
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.compression.codecs import Codec
from rayzero.engine.compression.gradients import QuantizedReduction
from rayzero.engine.optim.optimizers import OneBitAdam
from rayzero.engine.optim.sharded_optimizer import OptimizerShard, ShardedOptimizer
from rayzero.engine.zero.reducer import UnitGradSpec


class OneBitAdamReduction(QuantizedReduction):
    """Reduces gradients uncompressed, and once variances are frozen, momenta as signs."""

    def __init__(
        self, codec: Codec, collectives: Collectives, device: torch.device, *, factor: float
    ) -> None:
        super().__init__(codec, collectives, device, feedback=True, factor=factor)
        self._optimizer: OneBitAdam | None = None
        self._shards_by_unit: defaultdict[str, list[OptimizerShard]] = defaultdict(list)

    def track_optimizer(self, optimizer: ShardedOptimizer) -> None:
        """Sets the optimizer whose momenta are reduced."""
        if isinstance(optimizer.torch_optimizer, OneBitAdam):
            self._optimizer = optimizer.torch_optimizer
            for shard in optimizer.shards:
                self._shards_by_unit[shard.unit.name].append(shard)

    def reduce_op(self, unit: UnitGradSpec) -> ReduceOp:
        return OneBitAdamReduce(super().reduce_op(unit), self._collectives, unit, self)

    def frozen_momenta(self, unit: UnitGradSpec) -> list[tuple[slice, Tensor, float]]:
        """(range, momentum, beta) of every shard of a unit that is past its warm-up."""
        if self._optimizer is None:
            return []
        betas = [group["betas"][0] for group in self._optimizer.param_groups]
        return [
            (shard.layout_range, self._optimizer.state[shard.weight]["exp_avg"], betas[shard.group])
            for shard in self._shards_by_unit[unit.name]
            if self._optimizer.is_variance_frozen(shard.weight)
        ]


class OneBitAdamReduce:
    """Reduces one unit's gradients, or momenta. See `ReduceOp`; for stage 0, which all-reduces.

    Args:
        quantized: reduces momenta as signs.
    """

    single_collective = False

    def __init__(
        self,
        quantized: ReduceOp,
        collectives: Collectives,
        unit: UnitGradSpec,
        reduction: OneBitAdamReduction,
    ) -> None:
        self.rank = collectives.rank
        self.world_size = collectives.world_size
        self._quantized = quantized
        self._collectives = collectives
        self._unit = unit
        self._reduction = reduction

    def all_reduce(self, full: Tensor) -> ChainableWork:
        momenta = self._reduction.frozen_momenta(self._unit)
        if not momenta:
            return self._collectives.all_reduce(full)
        # Reduced gradients times this are in units of momenta, which have no loss scale.
        factor = self._reduction.residual_factor
        for extent, average, beta in momenta:
            # The ranks' terms sum to the next momentum, before multiplication by the factor.
            part = full[extent].mul_(1.0 - beta)
            part.add_(average.to(part.device), alpha=beta / (factor * self.world_size))

        def as_gradient() -> None:
            for extent, average, beta in momenta:
                part = full[extent].sub_(average.to(full.device), alpha=beta / factor)
                part.div_(1.0 - beta)

        return self._quantized.all_reduce(full).then(as_gradient)

    def reduce_scatter(
        self, full: Tensor, out: Tensor, *, accumulate: bool = False
    ) -> ChainableWork:
        return self._quantized.reduce_scatter(full, out, accumulate=accumulate)
