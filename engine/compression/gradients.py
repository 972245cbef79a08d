"""Gradient reduction in compressed form: quantized, or as low-rank factors."""

from __future__ import annotations

from collections.abc import Iterator

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
from rayzero.engine.zero.reducer import ErrorFeedback, GradReduction, UnitGradSpec


class QuantizedReduction(GradReduction):
    """Gradients are quantized before they are sent.

    Args:
        feedback: add quantization errors to the next gradients.
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
        super().__init__(collectives, factor)
        self._device = device
        self._use_feedback = feedback
        self._codec_context = CodecContext(
            codec, collectives, PayloadBuffers(collectives, device), CollectiveSequencer()
        )

    def reduce_op(self, unit: UnitGradSpec) -> ReduceOp:
        codec = self._codec_context.codec
        if self._use_feedback:
            feedback = make_error_feedback(unit, codec.name, self._device, reduced=unit.replicated)
            self.residuals.append(feedback)
            return QuantizedReduce(self._codec_context, unit.layout.padding, feedback)
        if self._collectives.world_size == 1 or codec.is_identity(unit.dtype):
            return self._collectives  # nothing to gain
        return QuantizedReduce(self._codec_context, unit.layout.padding, None)

    @property
    def buffer_bytes(self) -> int:
        return self._codec_context.buffers.total_bytes


class PowerSGDReduction(GradReduction):
    """Each gradient matrix is sent as two low-rank factors.

    Args:
        rank: of the factors.
    """

    def __init__(
        self, rank: int, collectives: Collectives, device: torch.device, *, factor: float
    ) -> None:
        super().__init__(collectives, factor)
        self._rank = rank
        self._device = device
        self._sequencer = CollectiveSequencer()
        self._reduce_ops: list[PowerSGDReduce] = []

    def replicated_state(self) -> Iterator[tuple[str, Tensor]]:
        for op in self._reduce_ops:
            for factors in op.factors.values():
                yield f"lowrank/{factors.name}", factors.basis

    def reduce_op(self, unit: UnitGradSpec) -> ReduceOp:
        # Reduced factors are not compressed again, so they have no residuals.
        feedback = make_error_feedback(unit, "lowrank", self._device, reduced=False)
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


def make_error_feedback(
    unit: UnitGradSpec, codec: str, device: torch.device, *, reduced: bool
) -> ErrorFeedback:
    """Residuals of zero, with those of the reduced shard if `reduced`.

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
    shard = torch.zeros_like(local[unit.shard]) if reduced else None
    return ErrorFeedback(unit, local, shard)
