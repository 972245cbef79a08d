"""Gradient reduction: uncompressed, quantized, or as low-rank factors. One object per run, chosen
in `select`; it makes every unit's `ReduceOp`, and owns the residuals of error feedback.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rayzero.engine.comm.backend import ReduceOp
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.compression.codecs import Codec
from rayzero.engine.compression.powersgd import PowerSGDReduce
from rayzero.engine.compression.quantized import (
    CodecContext,
    CollectiveSequencer,
    PayloadBuffers,
    QuantizedReduce,
)
from rayzero.engine.errors import ConfigError
from rayzero.engine.zero.reducer import ErrorFeedback, UnitGradSpec, UnitResiduals


class PlainReduction:
    """Gradients are reduced uncompressed."""

    residual_factor = 1.0
    buffer_bytes = 0

    def __init__(self, collectives: Collectives) -> None:
        self.residuals: list[UnitResiduals] = []
        self._collectives = collectives

    def replicated_state(self) -> Iterator[tuple[str, Tensor]]:
        yield from ()

    def reduce_op(self, unit: UnitGradSpec) -> ReduceOp:
        return self._collectives

    def discard_residuals(self) -> None:
        return

    def rescale(self, ratio: float) -> None:
        return


class QuantizedReduction:
    """Gradients are quantized before they are sent.

    Args:
        feedback: add quantization errors to the next gradients.
        factor: the initial `residual_factor`.
    """

    def __init__(
        self,
        codec: Codec,
        collectives: Collectives,
        device: torch.device,
        *,
        feedback: bool,
        factor: float,
    ) -> None:
        self.residuals: list[UnitResiduals] = []
        self.residual_factor = factor
        self._use_feedback = feedback
        self._device = device
        self._codec_context = CodecContext(
            codec, collectives, PayloadBuffers(collectives, device), CollectiveSequencer()
        )

    def replicated_state(self) -> Iterator[tuple[str, Tensor]]:
        yield from ()

    def reduce_op(self, unit: UnitGradSpec) -> ReduceOp:
        context = self._codec_context
        alone = context.collectives.world_size == 1
        if not self._use_feedback and (alone or context.codec.is_identity(unit.dtype)):
            return context.collectives  # nothing to gain
        return self.quantized_reduce(unit)

    def quantized_reduce(self, unit: UnitGradSpec) -> QuantizedReduce:
        """A quantized reduction, even where uncompressed gradients would be as small."""
        context, feedback = self._codec_context, None
        if self._use_feedback:
            feedback = make_error_feedback(unit, context.codec.name, self._device)
            self.residuals.append(UnitResiduals(unit, feedback))
        return QuantizedReduce(context, unit.layout.padding, feedback)

    def discard_residuals(self) -> None:
        for residuals in self.residuals:
            residuals.feedback.reset()

    def rescale(self, ratio: float) -> None:
        _rescale_feedback(self.residuals, ratio)
        self.residual_factor /= ratio

    @property
    def buffer_bytes(self) -> int:
        return self._codec_context.buffers.total_bytes


class PowerSGDReduction:
    """Each gradient matrix is sent as two low-rank factors.

    Args:
        rank: of the factors.
        factor: the initial `residual_factor`.
    """

    def __init__(
        self, rank: int, collectives: Collectives, device: torch.device, *, factor: float
    ) -> None:
        self.residuals: list[UnitResiduals] = []
        self.residual_factor = factor
        self._rank = rank
        self._collectives = collectives
        self._device = device
        self._sequencer = CollectiveSequencer()
        self._reduce_ops: list[PowerSGDReduce] = []

    def replicated_state(self) -> Iterator[tuple[str, Tensor]]:
        for op in self._reduce_ops:
            for factors in op.factors.values():
                yield f"lowrank/{factors.name}", factors.basis

    def reduce_op(self, unit: UnitGradSpec) -> ReduceOp:
        local = make_error_feedback(unit, "lowrank", self._device).local
        feedback = ErrorFeedback(local)  # reduced factors are not compressed again
        self.residuals.append(UnitResiduals(unit, feedback))
        op = PowerSGDReduce(self._collectives, self._sequencer, unit.layout, self._rank, feedback)
        self._reduce_ops.append(op)
        return op

    def discard_residuals(self) -> None:
        for op in self._reduce_ops:
            op.reset()

    @property
    def buffer_bytes(self) -> int:
        return sum(op.buffer_bytes for op in self._reduce_ops)

    def rescale(self, ratio: float) -> None:
        _rescale_feedback(self.residuals, ratio)
        self.residual_factor /= ratio


def _rescale_feedback(residuals: Sequence[UnitResiduals], ratio: float) -> None:
    """Exact for powers of two, which ratios of loss scales are."""
    for unit in residuals:
        unit.feedback.scale(ratio)


def make_error_feedback(unit: UnitGradSpec, codec: str, device: torch.device) -> ErrorFeedback:
    """Residuals of zero.

    Raises:
        ConfigError: the gradients' dtype cannot represent the residuals.
    """
    dtype = unit.dtype
    if dtype.itemsize < 4:
        raise ConfigError(
            f"compression {codec!r} uses error feedback, and the gradients of {unit.name} are "
            f"{dtype}",
            allowed="main gradients in fp32; int8, bf16 and fp16 need no error feedback",
            fix='data_types.grad_accum_dtype: fp32; "bf16": {"enabled": true} for a model in 16 '
            "bits; or another compression",
        )
    local = torch.zeros(unit.layout.numel, dtype=dtype, device=device)
    return ErrorFeedback(local, torch.zeros_like(local[unit.shard]) if unit.replicated else None)
