"""How gradients travel: plain, as codes, or as low-rank factors. One object a run, chosen in
`factory`; it makes every unit's `Sums`, and owns what coding has lost (error feedback).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rayzero.engine.comm.code_buffers import CodeBuffers
from rayzero.engine.comm.codecs.codec import Codec
from rayzero.engine.comm.coded import CodedSums, Coding
from rayzero.engine.comm.collectives import Collectives, Sums
from rayzero.engine.comm.feedback import Feedback
from rayzero.engine.comm.lowrank import LowRankSums
from rayzero.engine.comm.turns import Turns
from rayzero.engine.errors import ConfigError
from rayzero.engine.zero.unit import Unit


@dataclass(frozen=True)
class Kept:
    """What coding one unit's gradients has lost on this rank: part of the training state."""

    unit: Unit
    feedback: Feedback


class GradientWay(Protocol):
    """Attributes:
    kept: the units with error feedback.
    factor: what residuals are to be multiplied by to be in units of the mean gradient; it
        depends on the world size where gradients are averaged late, and on the loss scale.
    """

    @property
    def factor(self) -> float: ...

    @property
    def kept(self) -> Sequence[Kept]: ...

    def shared(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of what is part of the state and equal on all ranks."""

    def sums(self, unit: Unit) -> Sums:
        """What sums a trainable unit's gradients over the ranks. Called once a unit."""

    def forget(self) -> None:
        """A step was skipped: nothing of its gradient may come back."""

    def rescale(self, ratio: float) -> None:
        """The loss scale is `ratio` times what it was, and so are all gradients to come."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that codes pass through."""


class PlainWay:
    """Gradients travel as they are."""

    factor = 1.0
    buffer_bytes = 0

    def __init__(self, collectives: Collectives) -> None:
        self.kept: list[Kept] = []
        self._collectives = collectives

    def shared(self) -> Iterator[tuple[str, Tensor]]:
        yield from ()

    def sums(self, unit: Unit) -> Sums:
        return self._collectives

    def forget(self) -> None:
        return

    def rescale(self, ratio: float) -> None:
        return


class CodedWay:
    """Gradients travel as codes.

    Args:
        feedback: whether what coding loses is added to the next gradients.
        factor: see `GradientWay`.
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
        self.kept: list[Kept] = []
        self.factor = factor
        self._feedback = feedback
        self._device = device
        self._coding = Coding(codec, collectives, CodeBuffers(collectives, device), Turns())

    def shared(self) -> Iterator[tuple[str, Tensor]]:
        yield from ()

    def sums(self, unit: Unit) -> Sums:
        coding = self._coding
        dtype = main_dtype(unit)
        alone = coding.collectives.world_size == 1
        if not self._feedback and (alone or coding.codec.is_identity(dtype)):
            return coding.collectives  # there is nothing to gain
        return self.coded(unit)

    def coded(self, unit: Unit) -> CodedSums:
        """Codes, whether or not there is anything to gain."""
        coding, feedback = self._coding, None
        if self._feedback:
            feedback = make_feedback(unit, coding.codec.name, self._device)
            self.kept.append(Kept(unit, feedback))
        return CodedSums(coding, unit.layout.gaps, feedback)

    def forget(self) -> None:
        for one in self.kept:
            one.feedback.forget()

    def rescale(self, ratio: float) -> None:
        _rescale(self.kept, ratio)
        self.factor /= ratio

    @property
    def buffer_bytes(self) -> int:
        return self._coding.buffers.total_bytes


class LowRankWay:
    """Gradients travel as the factors of every matrix.

    Args:
        rank: of the factors.
        factor: see `GradientWay`.
    """

    def __init__(
        self, rank: int, collectives: Collectives, device: torch.device, *, factor: float
    ) -> None:
        self.kept: list[Kept] = []
        self.factor = factor
        self._rank = rank
        self._collectives = collectives
        self._device = device
        self._turns = Turns()
        self._sums: list[LowRankSums] = []

    def shared(self) -> Iterator[tuple[str, Tensor]]:
        for sums in self._sums:
            for one in sums.factored.values():
                yield f"lowrank/{one.name}", one.basis

    def sums(self, unit: Unit) -> Sums:
        terms = make_feedback(unit, "lowrank", self._device).of_terms
        feedback = Feedback(terms)  # sums are exact but for what terms have lost
        self.kept.append(Kept(unit, feedback))
        sums = LowRankSums(self._collectives, self._turns, unit.layout, self._rank, feedback)
        self._sums.append(sums)
        return sums

    def forget(self) -> None:
        for sums in self._sums:
            sums.start_anew()

    @property
    def buffer_bytes(self) -> int:
        return sum(sums.buffer_bytes for sums in self._sums)

    def rescale(self, ratio: float) -> None:
        _rescale(self.kept, ratio)
        self.factor /= ratio


def main_dtype(unit: Unit) -> torch.dtype:
    """The dtype of a trainable unit's main grads."""
    if unit.grads is None:
        raise ValueError(f"{unit.name} is frozen")
    return unit.grads.owned().dtype


def _rescale(kept: Sequence[Kept], ratio: float) -> None:
    """Exact, as long as the ratio is a power of two, which it is between two loss scales."""
    for one in kept:
        one.feedback.scale(ratio)


def make_feedback(unit: Unit, codec: str, device: torch.device) -> Feedback:
    """Nothing lost yet.

    Raises:
        ConfigError: the gradients are too coarse to keep what is lost of them.
    """
    dtype = main_dtype(unit)
    if dtype.itemsize < 4:
        raise ConfigError(
            f"compression {codec!r} keeps what it loses of a gradient, and the gradients of "
            f"{unit.name} are {dtype}",
            allowed="main grads in fp32; int8, bf16 or fp16 keep nothing",
            fix='data_types.grad_accum_dtype: fp32; "bf16": {"enabled": true} for a model in 16 '
            "bits; or another compression",
        )
    terms = torch.zeros(unit.layout.numel, dtype=dtype, device=device)
    whole = unit.owned != unit.shard or unit.layout.world_size == 1
    return Feedback(terms, torch.zeros_like(terms[unit.shard]) if whole else None)
