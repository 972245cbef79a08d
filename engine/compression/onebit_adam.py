"""Communication of 1-bit Adam (Tang et al. 2021): gradients in the warm-up, then momenta as signs.

All ranks have the same momentum m of the previous step. Each computes its own next one from its own
gradient, and these are reduced as signs with error feedback, as gradients are with the sign codec.
The result is everyone's next momentum; the optimizer gets the gradient that leads to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rayzero.engine.comm.backend import ChainableWork, ReduceOp
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.compression.codecs import Codec
from rayzero.engine.compression.gradients import QuantizedReduction
from rayzero.engine.compression.quantized import QuantizedReduce
from rayzero.engine.optim.optimizers import OneBitAdam
from rayzero.engine.optim.sharded_optimizer import OptimizerShard, ShardedOptimizer
from rayzero.engine.zero.reducer import UnitGradSpec, UnitResiduals


@dataclass
class OptimizerMomenta:
    """The optimizer's momenta; empty until it has been built.

    Attributes:
        factor: reduced gradients times this are in units of momenta, which have no loss scale.
    """

    factor: float
    optimizer: OneBitAdam | None = None
    shards_by_unit: dict[str, list[OptimizerShard]] = field(default_factory=dict)  # by name

    def frozen_momenta(self, unit: UnitGradSpec) -> list[tuple[slice, Tensor, float]]:
        """(range, momentum, beta) of every shard of a unit that is past its warm-up."""
        if self.optimizer is None:
            return []
        betas = [group["betas"][0] for group in self.optimizer.param_groups]
        return [
            (shard.layout_range, self.optimizer.state[shard.weight]["exp_avg"], betas[shard.group])
            for shard in self.shards_by_unit.get(unit.name, ())
            if self.optimizer.is_variance_frozen(shard.weight)
        ]


class OneBitAdamReduce:
    """Reduces one unit's gradients, or momenta. See `ReduceOp`; for stage 0, which all-reduces.

    Args:
        quantized: reduces momenta as signs.
    """

    single_collective = False

    def __init__(
        self,
        quantized: QuantizedReduce,
        collectives: Collectives,
        unit: UnitGradSpec,
        momenta: OptimizerMomenta,
    ) -> None:
        self.rank = collectives.rank
        self.world_size = collectives.world_size
        self._quantized = quantized
        self._collectives = collectives
        self._unit = unit
        self._momenta = momenta

    def all_reduce(self, full: Tensor) -> ChainableWork:
        momenta = self._momenta.frozen_momenta(self._unit)
        if not momenta:
            return self._collectives.all_reduce(full)
        factor = self._momenta.factor
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


class OneBitAdamReduction:
    """Reduces gradients uncompressed, and once variances are frozen, momenta as signs."""

    def __init__(
        self, codec: Codec, collectives: Collectives, device: torch.device, *, factor: float
    ) -> None:
        self._collectives = collectives
        self._momenta = OptimizerMomenta(factor)
        self._quantized = QuantizedReduction(
            codec, collectives, device, feedback=True, factor=factor
        )

    @property
    def residual_factor(self) -> float:
        return self._quantized.residual_factor

    @property
    def residuals(self) -> list[UnitResiduals]:
        return self._quantized.residuals

    @property
    def buffer_bytes(self) -> int:
        return self._quantized.buffer_bytes

    def replicated_state(self) -> Iterator[tuple[str, Tensor]]:
        yield from ()

    def reduce_op(self, unit: UnitGradSpec) -> ReduceOp:
        quantized = self._quantized.quantized_reduce(unit)
        return OneBitAdamReduce(quantized, self._collectives, unit, self._momenta)

    def track_optimizer(self, optimizer: ShardedOptimizer) -> None:
        """Sets the optimizer whose momenta are reduced."""
        if isinstance(optimizer.torch_optimizer, OneBitAdam):
            self._momenta.optimizer = optimizer.torch_optimizer
            for shard in optimizer.shards:
                self._momenta.shards_by_unit.setdefault(shard.unit.name, []).append(shard)

    def discard_residuals(self) -> None:
        self._quantized.discard_residuals()

    def rescale(self, ratio: float) -> None:
        self._quantized.rescale(ratio)
        self._momenta.factor = self._quantized.residual_factor
