"""Sums of codes: encode, exchange, decode. The way of a codec over any backend.

A reduce-scatter is an all-to-all of codes, each rank's part coded by itself, and a sum of what they
stand for, in the order of ranks. An all-reduce is that, and an all-gather of the coded sums; this
rank decodes its own codes too, so every rank gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayzero.engine.comm.code_buffers import CodeBuffers
from rayzero.engine.comm.codecs.codec import Codec
from rayzero.engine.comm.collectives import Collectives, Done, Pending, part_of
from rayzero.engine.comm.feedback import Feedback
from rayzero.engine.comm.turns import Turns


@dataclass(frozen=True)
class Coding:
    """What all coded sums of an engine share."""

    codec: Codec
    collectives: Collectives
    buffers: CodeBuffers
    turns: Turns

    @property
    def ranks(self) -> range:
        return range(self.collectives.world_size)

    def part(self, full: Tensor, rank: int) -> Tensor:
        return part_of(full, rank, self.collectives.world_size)

    def codes_for(self, full: Tensor) -> int:
        """Bytes of all parts of `full`, each coded by itself."""
        ranks = self.collectives.world_size
        return ranks * self.codec.coded_bytes(full.numel() // ranks)

    def add_up(self, received: Tensor, out: Tensor, *, accumulate: bool) -> None:
        """The sum of the terms that all ranks sent of one part."""
        for rank in self.ranks:
            self.codec.decode(self.part(received, rank), out, add=accumulate or rank > 0)

    def encode(self, values: Tensor, codes: Tensor, lost: Tensor | None) -> None:
        """Codes one part. With feedback, what was lost before is added to `values` first."""
        if lost is None:
            self.codec.encode(values, codes)
            return
        values.add_(lost)
        self.codec.encode(values, codes)
        self.codec.decode(codes, lost, add=False)
        torch.sub(values, lost, out=lost)


class CodedSums:
    """One unit's gradients, summed as codes. See `Sums`; `full` is left undefined.

    Args:
        gaps: the unit's padding. A codec that knows no zero would put values there.
        feedback: what coding lost so far; None where that is forgotten.
    """

    def __init__(self, coding: Coding, gaps: Sequence[slice], feedback: Feedback | None) -> None:
        self.rank = coding.collectives.rank
        self.world_size = coding.collectives.world_size
        self._coding = coding
        self._gaps = () if coding.codec.keeps_zero else tuple(gaps)
        self.feedback = feedback

    def reduce_scatter(self, full: Tensor, out: Tensor, *, accumulate: bool = False) -> Pending:
        coding, exchange = self._coding, self._encoded(full)

        def finish() -> None:
            coding.add_up(exchange.received, out, accumulate=accumulate)
            self._clear(out, coding.collectives.rank * out.numel())
            exchange.end()

        return coding.turns.start([exchange.scatter], finish)

    def all_reduce(self, full: Tensor) -> Pending:
        coding, exchange = self._coding, self._encoded(full)
        rank = coding.collectives.rank
        own, lost = coding.part(full, rank), self.feedback.of_sum if self.feedback else None

        def gather() -> Pending:
            coding.add_up(exchange.received, own, accumulate=False)
            self._clear(own, rank * own.numel())
            coding.encode(own, coding.part(exchange.received, rank), lost)
            if lost is not None:
                self._clear(lost, rank * own.numel())
            return exchange.gather()

        def finish() -> None:
            for one in coding.ranks:
                coding.codec.decode(
                    coding.part(exchange.received, one), coding.part(full, one), add=False
                )
            self._clear(full, 0)
            exchange.end()

        return coding.turns.start([exchange.scatter, gather], finish)

    def _encoded(self, full: Tensor) -> _Exchange:
        coding = self._coding
        exchange = _Exchange(coding, coding.codes_for(full))
        terms = self.feedback.of_terms if self.feedback else None
        for rank in coding.ranks:
            lost = None if terms is None else coding.part(terms, rank)
            coding.encode(coding.part(full, rank), coding.part(exchange.sent, rank), lost)
        if terms is not None:
            self._clear(terms, 0)
        return exchange

    def _clear(self, values: Tensor, start: int) -> None:
        """Padding stays zero in `values`, which lie at `start` in the unit's flat layout."""
        for gap in self._gaps:
            first, last = max(gap.start - start, 0), min(gap.stop - start, values.numel())
            if first < last:
                values[first:last].zero_()


class _Exchange:
    """The buffers of one coded sum: a part for each rank, sent and received."""

    def __init__(self, coding: Coding, nbytes: int) -> None:
        self._coding = coding
        self._bases = coding.buffers.take(nbytes), coding.buffers.take(nbytes)
        self.sent, self.received = (base[:nbytes] for base in self._bases)
        self._scattered: Pending = Done()
        self._gathered: Pending = Done()

    def scatter(self) -> Pending:
        self._scattered = self._coding.collectives.all_to_all(self.sent, self.received)
        return self._scattered

    def gather(self) -> Pending:
        """Of the parts of `received`, this rank's being its own."""
        own = self._coding.part(self.received, self._coding.collectives.rank)
        self._gathered = self._coding.collectives.all_gather(self.received, own)
        return self._gathered

    def end(self) -> None:
        """All has been decoded."""
        for base, last in zip(self._bases, (self._scattered, self._gathered), strict=True):
            self._coding.buffers.give_back(base, last)
