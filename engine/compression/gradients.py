"""Reduction of compressed gradients: quantized, as low-rank factors, or as 1-bit momenta."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

from rayzero.engine.comm.backend import ChainableWork, ReduceOp
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.compression.codecs import CODECS, Codec, SignCodec
from rayzero.engine.compression.powersgd import PowerSGDReduce
from rayzero.engine.compression.quantized import CodecContext, CollectiveSequencer, QuantizedReduce
from rayzero.engine.config.compression import is_onebit, selected_codecs
from rayzero.engine.errors import ConfigError
from rayzero.engine.optim.onebit import MomentumReduced
from rayzero.engine.optim.sharded_optimizer import OptimizerShard, ShardedOptimizer
from rayzero.engine.zero.build_context import BuildContext
from rayzero.engine.zero.grad_reduction import ErrorFeedback, GradReduction, UnitGradSpec

log = logging.getLogger("rayzero.engine")


class QuantizedReduction(GradReduction):
    """Quantizes gradients before they are sent. With `feedback`, quantization errors are added to
    the next gradients."""

    def __init__(
        self, codec: Codec, collectives: Collectives, *, feedback: bool, factor: float
    ) -> None:
        super().__init__(collectives, factor)
        self._use_feedback = feedback
        self._codec_context = CodecContext(codec, collectives)

    def reduce_op(self, unit: UnitGradSpec) -> ReduceOp:
        context = self._codec_context
        if self._use_feedback:
            return QuantizedReduce(context, unit.layout.padding, self._add_feedback(unit))
        if self._collectives.world_size == 1 or context.codec.is_identity(unit.dtype):
            return self._collectives  # compression saves nothing
        return QuantizedReduce(context, unit.layout.padding, None)

    def _add_feedback(self, unit: UnitGradSpec) -> ErrorFeedback:
        name = self._codec_context.codec.name
        device = self._collectives.device
        feedback = make_error_feedback(unit, name, device, reduced=unit.replicated)
        self.residuals.append(feedback)
        return feedback

    @property
    def buffer_bytes(self) -> int:
        return self._codec_context.buffers.total_bytes


class PowerSGDReduction(GradReduction):
    """Sends each gradient matrix as two factors of the given `rank`."""

    def __init__(self, rank: int, collectives: Collectives, *, factor: float) -> None:
        super().__init__(collectives, factor)
        self._rank = rank
        self._sequencer = CollectiveSequencer()
        self._reduce_ops: list[PowerSGDReduce] = []

    def replicated_state(self) -> Iterator[tuple[str, Tensor]]:
        for op in self._reduce_ops:
            for factors in op.factors.values():
                yield f"lowrank/{factors.name}", factors.basis

    def reduce_op(self, unit: UnitGradSpec) -> ReduceOp:
        # Reduced factors are not compressed again, so they have no residuals.
        device = self._collectives.device
        feedback = make_error_feedback(unit, "lowrank", device, reduced=False)
        self.residuals.append(feedback)
        op = PowerSGDReduce(self._collectives, self._sequencer, unit.layout, self._rank, feedback)
        self._reduce_ops.append(op)
        return op

    def discard_residuals(self) -> None:
        super().discard_residuals()
        for op in self._reduce_ops:
            op.reset_bases()

    @property
    def buffer_bytes(self) -> int:
        return sum(op.buffer_bytes for op in self._reduce_ops)


class OneBitAdamReduction(QuantizedReduction):
    """Reduces gradients for 1-bit Adam (Tang et al. 2021), 0/1 Adam and 1-bit LAMB: gradients in
    steps that change variances, momenta as signs in the other steps.

    All ranks have the same momentum of the previous step. Each rank computes its own next momentum
    from its own gradient. These are reduced as signs with error feedback. The result is the next
    momentum of all ranks. The optimizer gets the gradient that leads to it.
    """

    def __init__(self, codec: Codec, collectives: Collectives, *, factor: float) -> None:
        super().__init__(codec, collectives, feedback=True, factor=factor)
        self._optimizer: MomentumReduced | None = None
        self._warned_unclipped = False
        self._shards_by_unit: defaultdict[str, list[OptimizerShard]] = defaultdict(list)

    def track_optimizer(self, optimizer: ShardedOptimizer) -> None:
        """Sets the optimizer whose momenta are reduced."""
        if isinstance(optimizer.torch_optimizer, MomentumReduced):
            self._optimizer = optimizer.torch_optimizer
            for shard in optimizer.shards:
                self._shards_by_unit[shard.unit.name].append(shard)

    def clip_limit(self, limit: float) -> float:
        """Returns `limit` in steps that reduce gradients. Returns 0 (no clipping) in other steps,
        because no rank has the norm of the whole gradient then."""
        optimizer = self._optimizer
        weights = [shard.weight for shards in self._shards_by_unit.values() for shard in shards]
        if optimizer is None or not limit or not any(map(optimizer.is_variance_frozen, weights)):
            return limit
        if not self._warned_unclipped and self._collectives.rank == 0:
            log.warning(
                "gradient_clipping limits no step in which %s reduces momenta as signs, of which "
                "this is the first: no rank has the whole gradient then. If most gradients were "
                "clipped until now, steps become longer: lower the learning rate, or use a larger "
                "gradient_clipping",
                type(optimizer).__name__,
            )
        self._warned_unclipped = True
        return 0.0

    def reduce_op(self, unit: UnitGradSpec) -> ReduceOp:
        return OneBitAdamReduce(self._codec_context, unit, self._add_feedback(unit), self)

    def frozen_momenta(self, unit: UnitGradSpec) -> list[tuple[slice, Tensor, float]]:
        """Returns (range, momentum, beta) of every shard of a unit that is past its warm-up."""
        if self._optimizer is None:
            return []
        betas = [group["betas"][0] for group in self._optimizer.param_groups]
        return [
            (shard.layout_range, self._optimizer.state[shard.weight]["exp_avg"], betas[shard.group])
            for shard in self._shards_by_unit[unit.name]
            if self._optimizer.is_variance_frozen(shard.weight)
        ]


class OneBitAdamReduce(QuantizedReduce):
    """Reduces one unit's gradients, or momenta as signs. Only for stage 0, which all-reduces."""

    def __init__(
        self,
        context: CodecContext,
        unit: UnitGradSpec,
        feedback: ErrorFeedback,
        reduction: OneBitAdamReduction,
    ) -> None:
        super().__init__(context, unit.layout.padding, feedback)
        self._unit = unit
        self._reduction = reduction

    def all_reduce(self, full: Tensor) -> ChainableWork:
        momenta = self._reduction.frozen_momenta(self._unit)
        if not momenta:
            return self._collectives.all_reduce(full)
        # Converts reduced gradients to units of momenta, which have no loss scale.
        factor = self._reduction.residual_factor
        for extent, average, beta in momenta:
            # The ranks' terms sum to the next momentum, before multiplication by the factor.
            part = full[extent].mul_(1.0 - beta)
            part.add_(average.to(part.device), alpha=beta / (factor * self.world_size))

        def as_gradient() -> None:
            for extent, average, beta in momenta:
                part = full[extent].sub_(average.to(full.device), alpha=beta / factor)
                part.div_(1.0 - beta)

        return super().all_reduce(full).then(as_gradient)


def make_error_feedback(
    unit: UnitGradSpec, codec: str, device: torch.device, *, reduced: bool
) -> ErrorFeedback:
    """Returns residuals of zero, with those of the reduced shard if `reduced`. Raises ConfigError
    if the gradients' dtype cannot represent the residuals."""
    dtype = unit.dtype
    if dtype.itemsize < 4:
        raise ConfigError(
            f"compression {codec!r} uses error feedback, and the gradients of {unit.name} are "
            f"{dtype}",
            allowed="main gradients in fp32; int8, bf16 and fp16 need no error feedback",
            fix='set data_types.grad_accum_dtype: fp32; "bf16": {"enabled": true} for a model in '
            "16 bits; or another compression",
        )
    local = torch.zeros(unit.layout.numel, dtype=dtype, device=device)
    shard = torch.zeros_like(local[unit.shard]) if reduced else None
    return ErrorFeedback(unit, local, shard)


def make_grad_reduction(context: BuildContext, factor: float) -> GradReduction:
    """Returns the gradient reduction that a config selects. `factor` is the one by which reduced
    gradients are still to be multiplied, apart from the loss scale."""
    config, collectives = context.config, context.collectives
    name = next(iter(selected_codecs(config).values()), "none")
    section = config.rayzero.compression
    factor /= context.precision.scaler.value
    if is_onebit(config):
        codec: Codec = SignCodec(section.block_size or 128)
        return OneBitAdamReduction(codec, collectives, factor=factor)
    if name == "none":
        return GradReduction(collectives, factor)
    if name == "lowrank":
        return PowerSGDReduction(section.rank, collectives, factor=factor)
    codec, feedback = CODECS[name](section.block_size), section.error_feedback
    if feedback is None:
        feedback = codec.needs_error_feedback
    return QuantizedReduction(codec, collectives, feedback=feedback, factor=factor)
