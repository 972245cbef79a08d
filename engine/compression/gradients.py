"""How gradients travel: plain, as codes, or as low-rank factors. One object a run, chosen in
`factory`; it makes every unit's `ReduceOp`, and owns what coding has lost (error feedback).
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
    """Gradients travel as they are."""

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
    """Gradients travel as codes.

    Args:
        feedback: whether what coding loses is added to the next gradients.
        factor: see `GradReduction`.
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
        coding = self._codec_context
        dtype = unit.dtype
        alone = coding.collectives.world_size == 1
        if not self._use_feedback and (alone or coding.codec.is_identity(dtype)):
            return coding.collectives  # there is nothing to gain
        return self.quantized_reduce(unit)

    def quantized_reduce(self, unit: UnitGradSpec) -> QuantizedReduce:
        """Codes, whether or not there is anything to gain."""
        coding, feedback = self._codec_context, None
        if self._use_feedback:
            feedback = make_error_feedback(unit, coding.codec.name, self._device)
            self.residuals.append(UnitResiduals(unit, feedback))
        return QuantizedReduce(coding, unit.layout.padding, feedback)

    def discard_residuals(self) -> None:
        for one in self.residuals:
            one.feedback.reset()

    def rescale(self, ratio: float) -> None:
        _rescale_feedback(self.residuals, ratio)
        self.residual_factor /= ratio

    @property
    def buffer_bytes(self) -> int:
        return self._codec_context.buffers.total_bytes


class PowerSGDReduction:
    """Gradients travel as the factors of every matrix.

    Args:
        rank: of the factors.
        factor: see `GradReduction`.
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
        for sums in self._reduce_ops:
            for one in sums.factors.values():
                yield f"lowrank/{one.name}", one.basis

    def reduce_op(self, unit: UnitGradSpec) -> ReduceOp:
        terms = make_error_feedback(unit, "lowrank", self._device).local
        feedback = ErrorFeedback(terms)  # sums are exact but for what terms have lost
        self.residuals.append(UnitResiduals(unit, feedback))
        sums = PowerSGDReduce(self._collectives, self._sequencer, unit.layout, self._rank, feedback)
        self._reduce_ops.append(sums)
        return sums

    def discard_residuals(self) -> None:
        for sums in self._reduce_ops:
            sums.reset()

    @property
    def buffer_bytes(self) -> int:
        return sum(sums.buffer_bytes for sums in self._reduce_ops)

    def rescale(self, ratio: float) -> None:
        _rescale_feedback(self.residuals, ratio)
        self.residual_factor /= ratio


def _rescale_feedback(kept: Sequence[UnitResiduals], ratio: float) -> None:
    """Exact, as long as the ratio is a power of two, which it is between two loss scales."""
    for one in kept:
        one.feedback.scale(ratio)


def make_error_feedback(unit: UnitGradSpec, codec: str, device: torch.device) -> ErrorFeedback:
    """Nothing lost yet.

    Raises:
        ConfigError: the gradients are too coarse to keep what is lost of them.
    """
    dtype = unit.dtype
    if dtype.itemsize < 4:
        raise ConfigError(
            f"compression {codec!r} keeps what it loses of a gradient, and the gradients of "
            f"{unit.name} are {dtype}",
            allowed="main grads in fp32; int8, bf16 or fp16 keep nothing",
            fix='data_types.grad_accum_dtype: fp32; "bf16": {"enabled": true} for a model in 16 '
            "bits; or another compression",
        )
    terms = torch.zeros(unit.layout.numel, dtype=dtype, device=device)
    return ErrorFeedback(terms, torch.zeros_like(terms[unit.shard]) if unit.replicated else None)
