"""Gradients as low-rank factors with error feedback (Vogels et al. 2019, "PowerSGD").

A matrix of n x m gradients M travels as P = M Q (n x r), and then, with P's columns made
orthonormal, as Mt P (m x r), Mt the transpose: one step of subspace iteration from the last sum's
Q. Both are plain all-reduces, because they are linear in M. What P Qt does not hold of a rank's own
M comes back with its next one. Vectors, and matrices too small to gain by it, travel as they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayzero.engine.comm.backend import CompletedWork, Work, copy_or_add_
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.compression.quantized import CollectiveSequencer, MultiStageReduce
from rayzero.engine.layout.flat_layout import ALIGN_NUMEL, ParamSpec, UnitLayout
from rayzero.engine.zero.reducer import ErrorFeedback


@dataclass(frozen=True)
class MatrixFactors:
    """One matrix of a unit: its extent as (n, m), and where its factors travel.

    Attributes:
        matrix: what a rank has to send, a view of its residuals.
        left: (n, r), in the first buffer.
        right: (m, r), in the second buffer.
        basis: (m, r), the last sum's right factor; equal on all ranks, part of the state.
    """

    name: str
    matrix: Tensor
    left: Tensor
    right: Tensor
    basis: Tensor

    def reset_basis(self) -> None:
        """A random basis, the same on every rank."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        self.basis.copy_(torch.randn(self.basis.shape, generator=generator))


class PowerSGDReduce:
    """One unit's gradients, summed as factors. See `ReduceOp`.

    Args:
        rank: of the factors.
        feedback: what the factors have lost so far on this rank.
    """

    single_collective = False

    def __init__(
        self,
        collectives: Collectives,
        turns: CollectiveSequencer,
        layout: UnitLayout,
        rank: int,
        feedback: ErrorFeedback,
    ) -> None:
        self.feedback = feedback
        self.rank = collectives.rank
        self.world_size = collectives.world_size
        self._collectives = collectives
        self._sequencer = turns
        self._layout = layout
        kept = feedback.local
        small = [spec for spec in layout.params if not _worthwhile(spec, rank)]
        large = [spec for spec in layout.params if _worthwhile(spec, rank)]
        lefts = [spec.shape[0] * rank for spec in large]
        rights = [spec.numel // spec.shape[0] * rank for spec in large]
        first, second = factor_buffer_numels(layout, rank)
        self._first_buffer = collectives.zeros(first, kept.dtype, kept.device)
        self._second_buffer = collectives.zeros(second, kept.dtype, kept.device)
        left, right = (
            _split_buffer(self._first_buffer, lefts),
            _split_buffer(self._second_buffer, rights),
        )
        self.factors: dict[int, MatrixFactors] = {}
        self._uncompressed: dict[int, Tensor] = {}  # what travels as it is, in the first buffer
        at = sum(lefts)
        for index, spec in enumerate(layout.params):
            if spec in small:
                self._uncompressed[index] = self._first_buffer[at : at + spec.numel]
                at += spec.numel
                continue
            own_left, own_right = next(left), next(right)
            self.factors[index] = MatrixFactors(
                spec.name,
                kept[layout.param_range(index)].view(spec.shape[0], -1),
                own_left.view(-1, rank),
                own_right.view(-1, rank),
                torch.empty_like(own_right).view(-1, rank),
            )
            self.factors[index].reset_basis()
        self._left_factors: dict[int, Tensor] = {}
        self._last_reduce: Work = CompletedWork()
        self._unreleased: list[Work] = []  # by other ranks, until they are released

    def all_reduce(self, full: Tensor) -> Work:
        return self._reduce(full, full, slice(0, self._layout.numel), add=False)

    def reduce_scatter(self, full: Tensor, out: Tensor, *, accumulate: bool = False) -> Work:
        return self._reduce(full, out, self._layout.shard(self.rank), add=accumulate)

    def reset(self) -> None:
        """A step was skipped: what is not finite must not stay."""
        self.feedback.reset()
        for one in self.factors.values():
            one.reset_basis()

    def _reduce(self, full: Tensor, out: Tensor, within: slice, *, add: bool) -> MultiStageReduce:
        self._last_reduce.wait()
        for pending in self._unreleased:
            pending.release()
        self._unreleased.clear()
        self.feedback.local.add_(full)
        for index, whole in self._uncompressed.items():
            kept = self.feedback.local[self._layout.param_range(index)]
            whole.copy_(kept)
            kept.zero_()
        for one in self.factors.values():
            torch.mm(one.matrix, one.basis, out=one.left)
        phased = self._sequencer.start(
            [lambda: self._all_reduce_factors(self._first_buffer), self._reduce_right_factors],
            lambda: self._reconstruct(out, within, add=add),
        )
        self._last_reduce = phased
        return phased

    def _reduce_right_factors(self) -> Work:
        """The first factors' sums are there: what they hold of this rank's matrices."""
        for index, one in self.factors.items():
            left, _ = torch.linalg.qr(one.left)
            self._left_factors[index] = left
            torch.mm(one.matrix.t(), left, out=one.right)
            one.matrix.addmm_(left, one.right.t(), alpha=-1.0)
        return self._all_reduce_factors(self._second_buffer) if self.factors else CompletedWork()

    def _reconstruct(self, out: Tensor, within: slice, *, add: bool) -> None:
        for one in self.factors.values():
            one.basis.copy_(one.right)
        for index, start, stop in self._layout.overlaps(within):
            at = self._layout.offsets[index] + start - within.start
            target = out[at : at + stop - start]
            if index in self._uncompressed:
                copy_or_add_(target, self._uncompressed[index][start:stop], add=add)
                continue
            one, left = self.factors[index], self._left_factors[index]
            columns = one.matrix.shape[1]
            first, last = start // columns, -(-stop // columns)
            values = (left[first:last] @ one.right.t()).view(-1)
            copy_or_add_(target, values[start - first * columns : stop - first * columns], add=add)

    def _all_reduce_factors(self, buffer: Tensor) -> Work:
        pending = self._collectives.all_reduce(buffer)
        self._unreleased.append(pending)
        return pending

    @property
    def buffer_bytes(self) -> int:
        """Bytes that factors pass through."""
        return self._first_buffer.nbytes + self._second_buffer.nbytes


def basis_numel(layout: UnitLayout, rank: int) -> int:
    """Elements of the right factors that are kept for the next sum."""
    large = [spec for spec in layout.params if _worthwhile(spec, rank)]
    return sum(spec.numel // spec.shape[0] * rank for spec in large)


def factor_buffer_numels(layout: UnitLayout, rank: int) -> tuple[int, int]:
    """Elements of the two buffers, each for an all-reduce, which cuts it into equal parts."""
    left = sum(
        spec.shape[0] * rank if _worthwhile(spec, rank) else spec.numel for spec in layout.params
    )
    step = ALIGN_NUMEL * layout.world_size
    first, second = (
        -(-max(numel, 1) // step) * step for numel in (left, basis_numel(layout, rank))
    )
    return first, second


def _worthwhile(spec: ParamSpec, rank: int) -> bool:
    """Whether a parameter's factors are fewer numbers than it has."""
    if len(spec.shape) < 2:
        return False
    rows = spec.shape[0]
    return (rows + spec.numel // rows) * rank < spec.numel


def _split_buffer(buffer: Tensor, lengths: Sequence[int]) -> Iterator[Tensor]:
    at = 0
    for length in lengths:
        yield buffer[at : at + length]
        at += length
