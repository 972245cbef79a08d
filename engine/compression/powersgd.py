"""Gradients as low-rank factors with error feedback (Vogels et al. 2019, "PowerSGD").

A matrix M of n x m gradients is reduced in two all-reduces: of P = M Q (n x r), and, with P's
columns made orthonormal, of the transpose of M times P (m x r). This is one step of subspace
iteration from the previous step's Q. Plain all-reduces suffice because both are linear in M. The
residual of a rank's M is added to its next M. Vectors, and matrices too small to benefit, are sent
uncompressed.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from rayzero.engine.comm.backend import ChainableWork, Work, copy_or_add_
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.compression.quantized import CollectiveSequencer, MultiStageReduce
from rayzero.engine.layout.flat_layout import ALIGN_NUMEL, ParamSpec, UnitLayout
from rayzero.engine.zero.grad_reduction import ErrorFeedback


@dataclass(frozen=True)
class MatrixFactors:
    """One matrix of a unit, and its factors.

    Attributes:
        matrix: gradient plus residual, (n, m). A view of the unit's residuals.
        left: the left factor, (n, r), in the first buffer.
        right: the right factor, (m, r), in the second buffer.
        basis: the last reduction's right factor, (m, r). Equal on all ranks, part of the state.
    """

    name: str
    matrix: Tensor
    left: Tensor
    right: Tensor
    basis: Tensor

    def reset_basis(self) -> None:
        """Replaces the basis by a random one, the same on every rank."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        self.basis.copy_(torch.randn(self.basis.shape, generator=generator))


class PowerSGDReduce:
    """Reduces one unit's gradients as factors. See `ReduceOp`.

    Args:
        rank: the rank of the factors.
        feedback: this rank's residuals.
    """

    single_collective = False

    def __init__(
        self,
        collectives: Collectives,
        sequencer: CollectiveSequencer,
        layout: UnitLayout,
        rank: int,
        feedback: ErrorFeedback,
    ) -> None:
        self.feedback = feedback
        self.rank = collectives.rank
        self.world_size = collectives.world_size
        self._collectives = collectives
        self._sequencer = sequencer
        self._layout = layout
        residuals = feedback.local
        large = {i: spec for i, spec in enumerate(layout.params) if _worthwhile(spec, rank)}
        small = {i: spec for i, spec in enumerate(layout.params) if i not in large}
        lefts = sum(spec.shape[0] * rank for spec in large.values())
        rights = sum(_matrix_shape(spec)[1] * rank for spec in large.values())

        def zeros(numel: int) -> Tensor:
            """Returns a buffer for all-reduces, whose length divides into equal parts."""
            step = ALIGN_NUMEL * layout.world_size
            length = -(-max(numel, 1) // step) * step
            return collectives.zeros(length, residuals.dtype)

        self._first_buffer = zeros(lefts + sum(spec.numel for spec in small.values()))
        self._second_buffer = zeros(rights)
        self.factors: dict[int, MatrixFactors] = {}
        self._uncompressed: dict[int, Tensor] = {}  # parts of the first buffer, after the factors
        left = right = 0
        for index, spec in large.items():
            rows, columns = _matrix_shape(spec)
            self.factors[index] = factors = MatrixFactors(
                spec.name,
                residuals[layout.param_range(index)].view(rows, columns),
                self._first_buffer[left : left + rows * rank].view(rows, rank),
                self._second_buffer[right : right + columns * rank].view(columns, rank),
                residuals.new_empty(columns, rank),
            )
            factors.reset_basis()
            left, right = left + rows * rank, right + columns * rank
        for index, spec in small.items():
            self._uncompressed[index] = self._first_buffer[left : left + spec.numel]
            left += spec.numel
        self._left_factors: dict[int, Tensor] = {}
        self._last_reduce: MultiStageReduce | None = None

    def all_reduce(self, full: Tensor) -> ChainableWork:
        return self._reduce(full, full, slice(0, self._layout.numel), add=False)

    def reduce_scatter(
        self, full: Tensor, out: Tensor, *, accumulate: bool = False
    ) -> ChainableWork:
        return self._reduce(full, out, self._layout.shard(self.rank), add=accumulate)

    def reset_bases(self) -> None:
        """Called when a step is skipped. Discards bases, which may not be finite."""
        for factors in self.factors.values():
            factors.reset_basis()

    def _reduce(self, full: Tensor, out: Tensor, within: slice, *, add: bool) -> MultiStageReduce:
        if self._last_reduce is not None:
            self._last_reduce.wait()
            for pending in self._last_reduce.works:
                pending.release()
        self.feedback.local.add_(full)
        for index, values in self._uncompressed.items():
            residuals = self.feedback.local[self._layout.param_range(index)]
            values.copy_(residuals)
            residuals.zero_()
        for factors in self.factors.values():
            torch.mm(factors.matrix, factors.basis, out=factors.left)
        work = self._sequencer.start(
            [lambda: self._collectives.all_reduce(self._first_buffer), self._reduce_right_factors],
            lambda _: self._reconstruct(out, within, add=add),
        )
        self._last_reduce = work
        return work

    def _reduce_right_factors(self) -> Work:
        """Projects this rank's matrices on the reduced left factors, and starts to reduce the right
        factors. The remainders become residuals."""
        for index, factors in self.factors.items():
            left, _ = torch.linalg.qr(factors.left)
            self._left_factors[index] = left
            torch.mm(factors.matrix.t(), left, out=factors.right)
            factors.matrix.addmm_(left, factors.right.t(), alpha=-1.0)
        return self._collectives.all_reduce(self._second_buffer) if self.factors else Work()

    def _reconstruct(self, out: Tensor, within: slice, *, add: bool) -> None:
        for factors in self.factors.values():
            factors.basis.copy_(factors.right)
        for part in self._layout.overlaps(within):
            index = part.index
            start = part.start
            stop = part.stop
            target = out[part.memory]
            if index in self._uncompressed:
                copy_or_add_(target, self._uncompressed[index][start:stop], add=add)
                continue
            factors, left = self.factors[index], self._left_factors[index]
            columns = factors.matrix.shape[1]
            first, last = start // columns, -(-stop // columns)
            values = (left[first:last] @ factors.right.t()).view(-1)
            copy_or_add_(target, values[start - first * columns : stop - first * columns], add=add)

    @property
    def buffer_bytes(self) -> int:
        return self._first_buffer.nbytes + self._second_buffer.nbytes


def _matrix_shape(spec: ParamSpec) -> tuple[int, int]:
    return spec.shape[0], spec.numel // spec.shape[0]


def _worthwhile(spec: ParamSpec, rank: int) -> bool:
    """Returns whether a parameter's factors have fewer elements than the parameter."""
    return len(spec.shape) >= 2 and sum(_matrix_shape(spec)) * rank < spec.numel
