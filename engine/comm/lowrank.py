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

from rayzero.engine.comm.collectives import Collectives, Done, Pending
from rayzero.engine.comm.feedback import Feedback
from rayzero.engine.comm.put import put
from rayzero.engine.comm.turns import Phased, Turns
from rayzero.engine.layout.partition import ALIGN, ParamSpec, UnitLayout


@dataclass(frozen=True)
class Factored:
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

    def start_anew(self) -> None:
        """A random basis, the same on every rank."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        self.basis.copy_(torch.randn(self.basis.shape, generator=generator))


class LowRankSums:
    """One unit's gradients, summed as factors. See `Sums`.

    Args:
        rank: of the factors.
        feedback: what the factors have lost so far on this rank.
    """

    def __init__(
        self,
        collectives: Collectives,
        turns: Turns,
        layout: UnitLayout,
        rank: int,
        feedback: Feedback,
    ) -> None:
        self.feedback = feedback
        self.rank = collectives.rank
        self.world_size = collectives.world_size
        self._collectives = collectives
        self._turns = turns
        self._layout = layout
        kept = feedback.of_terms
        small = [spec for spec in layout.params if not _gains(spec, rank)]
        large = [spec for spec in layout.params if _gains(spec, rank)]
        lefts = [spec.shape[0] * rank for spec in large]
        rights = [spec.numel // spec.shape[0] * rank for spec in large]
        first, second = buffer_numels(layout, rank)
        self._first = collectives.zeros(first, kept.dtype, kept.device)
        self._second = collectives.zeros(second, kept.dtype, kept.device)
        left, right = _cut(self._first, lefts), _cut(self._second, rights)
        self.factored: dict[int, Factored] = {}
        self._whole: dict[int, Tensor] = {}  # what travels as it is, in the first buffer
        at = sum(lefts)
        for index, spec in enumerate(layout.params):
            if spec in small:
                self._whole[index] = self._first[at : at + spec.numel]
                at += spec.numel
                continue
            own_left, own_right = next(left), next(right)
            self.factored[index] = Factored(
                spec.name,
                kept[layout.extent(index)].view(spec.shape[0], -1),
                own_left.view(-1, rank),
                own_right.view(-1, rank),
                torch.empty_like(own_right).view(-1, rank),
            )
            self.factored[index].start_anew()
        self._orthonormal: dict[int, Tensor] = {}
        self._last: Pending = Done()
        self._read: list[Pending] = []  # by other ranks, until they are released

    def all_reduce(self, full: Tensor) -> Pending:
        return self._sum(full, full, slice(0, self._layout.numel), add=False)

    def reduce_scatter(self, full: Tensor, out: Tensor, *, accumulate: bool = False) -> Pending:
        return self._sum(full, out, self._layout.shard(self.rank), add=accumulate)

    def start_anew(self) -> None:
        """A step was skipped: what is not finite must not stay."""
        self.feedback.forget()
        for one in self.factored.values():
            one.start_anew()

    def _sum(self, full: Tensor, out: Tensor, within: slice, *, add: bool) -> Phased:
        self._last.wait()
        for pending in self._read:
            pending.release()
        self._read.clear()
        self.feedback.of_terms.add_(full)
        for index, whole in self._whole.items():
            kept = self.feedback.of_terms[self._layout.extent(index)]
            whole.copy_(kept)
            kept.zero_()
        for one in self.factored.values():
            torch.mm(one.matrix, one.basis, out=one.left)
        phased = self._turns.start(
            [lambda: self._travel(self._first), self._second_factors],
            lambda: self._decode(out, within, add=add),
        )
        self._last = phased
        return phased

    def _second_factors(self) -> Pending:
        """The first factors' sums are there: what they hold of this rank's matrices."""
        for index, one in self.factored.items():
            left, _ = torch.linalg.qr(one.left)
            self._orthonormal[index] = left
            torch.mm(one.matrix.t(), left, out=one.right)
            one.matrix.addmm_(left, one.right.t(), alpha=-1.0)
        return self._travel(self._second) if self.factored else Done()

    def _decode(self, out: Tensor, within: slice, *, add: bool) -> None:
        for one in self.factored.values():
            one.basis.copy_(one.right)
        for index, start, stop in self._layout.overlaps(within):
            at = self._layout.offsets[index] + start - within.start
            target = out[at : at + stop - start]
            if index in self._whole:
                put(target, self._whole[index][start:stop], add=add)
                continue
            one, left = self.factored[index], self._orthonormal[index]
            columns = one.matrix.shape[1]
            first, last = start // columns, -(-stop // columns)
            values = (left[first:last] @ one.right.t()).view(-1)
            put(target, values[start - first * columns : stop - first * columns], add=add)

    def _travel(self, buffer: Tensor) -> Pending:
        pending = self._collectives.all_reduce(buffer)
        self._read.append(pending)
        return pending

    @property
    def buffer_bytes(self) -> int:
        """Bytes that factors pass through."""
        return self._first.nbytes + self._second.nbytes


def basis_numel(layout: UnitLayout, rank: int) -> int:
    """Elements of the right factors that are kept for the next sum."""
    large = [spec for spec in layout.params if _gains(spec, rank)]
    return sum(spec.numel // spec.shape[0] * rank for spec in large)


def buffer_numels(layout: UnitLayout, rank: int) -> tuple[int, int]:
    """Elements of the two buffers, each for an all-reduce, which cuts it into equal parts."""
    left = sum(spec.shape[0] * rank if _gains(spec, rank) else spec.numel for spec in layout.params)
    step = ALIGN * layout.world_size
    first, second = (
        -(-max(numel, 1) // step) * step for numel in (left, basis_numel(layout, rank))
    )
    return first, second


def _gains(spec: ParamSpec, rank: int) -> bool:
    """Whether a parameter's factors are fewer numbers than it has."""
    if len(spec.shape) < 2:
        return False
    rows = spec.shape[0]
    return (rows + spec.numel // rows) * rank < spec.numel


def _cut(buffer: Tensor, lengths: Sequence[int]) -> Iterator[Tensor]:
    at = 0
    for length in lengths:
        yield buffer[at : at + length]
        at += length
