"""Quantized reduce: buffers, error feedback, collective sequencer.

Sums of codes: encode, exchange, decode. The way of a codec over any backend.

A reduce-scatter is an all-to-all of codes, each rank's part coded by itself, and a sum of what they
stand for, in the order of ranks. An all-reduce is that, and an all-gather of the coded sums; this
rank decodes its own codes too, so every rank gets the same bits.

Buffers for codes, kept and used again: once all are made, nothing is allocated in a step.

Error feedback: what coding lost of a gradient is added to the next one (Seide et al. 2014;
Karimireddy et al. 2019). It is training state: over all ranks, it adds up to the gradient that has
not been applied yet.

Sums that take several exchanges, in one order on every rank.

Every rank must launch the same exchanges in the same order, but when a rank waits for a sum depends
on its own timing. So a sum's later exchanges are launched at the latest when the next sum begins,
and never before those of the sums before it: the order is sum by sum, whoever waits when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayzero.engine.comm.backend import CompletedWork, Work, rank_chunk
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.compression.codecs import Codec
from rayzero.engine.zero.reducer import ErrorFeedback


class PayloadBuffers:
    """Bytes that collectives may be called on. All are as long as the longest asked for so far."""

    def __init__(self, collectives: Collectives, device: torch.device) -> None:
        self._collectives = collectives
        self._device = device
        self._largest_bytes = 0
        self._free: deque[tuple[Tensor, Work]] = deque()  # given back first, taken first
        self.total_bytes = 0

    def acquire(self, nbytes: int) -> Tensor:
        """A buffer of at least so many bytes, which no rank reads any more."""
        self._largest_bytes = max(self._largest_bytes, nbytes)
        for index, (buffer, last) in enumerate(self._free):
            if buffer.numel() >= nbytes:
                del self._free[index]
                last.release()
                return buffer
        buffer = self._collectives.zeros(self._largest_bytes, torch.uint8, self._device)
        self.total_bytes += buffer.nbytes
        return buffer

    def release(self, buffer: Tensor, last: Work) -> None:
        """`last` is the exchange that other ranks read the buffer in; it has been waited for."""
        self._free.append((buffer, last))


MAX_IN_FLIGHT = 4  # sums under way: each holds buffers for its codes


class MultiStageReduce:
    """A sum under way: its exchanges, each launched when the one before it has arrived."""

    def __init__(
        self,
        turns: CollectiveSequencer,
        launches: Sequence[Callable[[], Work]],
        finish: Callable[[], None],
    ) -> None:
        self._sequencer = turns
        self._remaining_stages = deque(launches)
        self._current = self._remaining_stages.popleft()()
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        if self._finish is None:
            return
        self._sequencer.launch_through(self)
        self._current.wait()
        finish, self._finish = self._finish, None
        finish()

    def release(self) -> None:
        """Other ranks read codes only, and those lie in buffers of their own."""
        self.wait()

    @property
    def finished(self) -> bool:
        return self._finish is None

    def launch_remaining(self) -> None:
        while self._remaining_stages:
            self._current.wait()
            self._current = self._remaining_stages.popleft()()


class CollectiveSequencer:
    """The sums under way on this rank, oldest first."""

    def __init__(self) -> None:
        self._in_flight: deque[MultiStageReduce] = deque()

    def start(
        self, launches: Sequence[Callable[[], Work]], finish: Callable[[], None]
    ) -> MultiStageReduce:
        """Begins a sum.

        Args:
            launches: start its exchanges; each is called when the one before has arrived.
            finish: makes the result of what the last one brought.
        """
        for one in self._in_flight:
            one.launch_remaining()
        while self._in_flight and (
            self._in_flight[0].finished or len(self._in_flight) >= MAX_IN_FLIGHT
        ):
            self._in_flight.popleft().wait()
        phased = MultiStageReduce(self, launches, finish)
        self._in_flight.append(phased)
        return phased

    def launch_through(self, last: MultiStageReduce) -> None:
        """Launches all that is left of the sums up to this one."""
        if last not in self._in_flight:  # all of it was launched when it left
            return
        for one in self._in_flight:
            one.launch_remaining()
            if one is last:
                return


@dataclass(frozen=True)
class CodecContext:
    """What all coded sums of an engine share."""

    codec: Codec
    collectives: Collectives
    buffers: PayloadBuffers
    sequencer: CollectiveSequencer

    @property
    def ranks(self) -> range:
        return range(self.collectives.world_size)

    def rank_chunk(self, full: Tensor, rank: int) -> Tensor:
        return rank_chunk(full, rank, self.collectives.world_size)

    def total_payload_bytes(self, full: Tensor) -> int:
        """Bytes of all parts of `full`, each coded by itself."""
        ranks = self.collectives.world_size
        return ranks * self.codec.payload_bytes(full.numel() // ranks)

    def sum_payloads(self, received: Tensor, out: Tensor, *, accumulate: bool) -> None:
        """The sum of the terms that all ranks sent of one part."""
        for rank in self.ranks:
            self.codec.decode(self.rank_chunk(received, rank), out, add=accumulate or rank > 0)

    def encode(self, values: Tensor, codes: Tensor, lost: Tensor | None) -> None:
        """Codes one part. With feedback, what was lost before is added to `values` first."""
        if lost is None:
            self.codec.encode(values, codes)
            return
        values.add_(lost)
        self.codec.encode(values, codes)
        self.codec.decode(codes, lost, add=False)
        torch.sub(values, lost, out=lost)


class QuantizedReduce:
    """One unit's gradients, summed as codes. See `ReduceOp`; `full` is left undefined.

    Args:
        gaps: the unit's padding. A codec that knows no zero would put values there.
        feedback: what coding lost so far; None where that is forgotten.
    """

    single_collective = False

    def __init__(
        self, coding: CodecContext, gaps: Sequence[slice], feedback: ErrorFeedback | None
    ) -> None:
        self.rank = coding.collectives.rank
        self.world_size = coding.collectives.world_size
        self._codec_context = coding
        self._padding = () if coding.codec.keeps_zero else tuple(gaps)
        self.feedback = feedback

    def reduce_scatter(self, full: Tensor, out: Tensor, *, accumulate: bool = False) -> Work:
        coding, exchange = self._codec_context, self._encode_chunks(full)

        def finish() -> None:
            coding.sum_payloads(exchange.received, out, accumulate=accumulate)
            self._zero_padding(out, coding.collectives.rank * out.numel())
            exchange.release_buffers()

        return coding.sequencer.start([exchange.all_to_all], finish)

    def all_reduce(self, full: Tensor) -> Work:
        coding, exchange = self._codec_context, self._encode_chunks(full)
        rank = coding.collectives.rank
        own, lost = coding.rank_chunk(full, rank), self.feedback.reduced if self.feedback else None

        def gather() -> Work:
            coding.sum_payloads(exchange.received, own, accumulate=False)
            self._zero_padding(own, rank * own.numel())
            coding.encode(own, coding.rank_chunk(exchange.received, rank), lost)
            if lost is not None:
                self._zero_padding(lost, rank * own.numel())
            return exchange.all_gather()

        def finish() -> None:
            for one in coding.ranks:
                coding.codec.decode(
                    coding.rank_chunk(exchange.received, one),
                    coding.rank_chunk(full, one),
                    add=False,
                )
            self._zero_padding(full, 0)
            exchange.release_buffers()

        return coding.sequencer.start([exchange.all_to_all, gather], finish)

    def _encode_chunks(self, full: Tensor) -> _PayloadExchange:
        coding = self._codec_context
        exchange = _PayloadExchange(coding, coding.total_payload_bytes(full))
        terms = self.feedback.local if self.feedback else None
        for rank in coding.ranks:
            lost = None if terms is None else coding.rank_chunk(terms, rank)
            coding.encode(
                coding.rank_chunk(full, rank), coding.rank_chunk(exchange.sent, rank), lost
            )
        if terms is not None:
            self._zero_padding(terms, 0)
        return exchange

    def _zero_padding(self, values: Tensor, start: int) -> None:
        """Padding stays zero in `values`, which lie at `start` in the unit's flat layout."""
        for gap in self._padding:
            first, last = max(gap.start - start, 0), min(gap.stop - start, values.numel())
            if first < last:
                values[first:last].zero_()


class _PayloadExchange:
    """The buffers of one coded sum: a part for each rank, sent and received."""

    def __init__(self, coding: CodecContext, nbytes: int) -> None:
        self._codec_context = coding
        self._buffers = coding.buffers.acquire(nbytes), coding.buffers.acquire(nbytes)
        self.sent, self.received = (base[:nbytes] for base in self._buffers)
        self._scattered: Work = CompletedWork()
        self._gathered: Work = CompletedWork()

    def all_to_all(self) -> Work:
        self._scattered = self._codec_context.collectives.all_to_all(self.sent, self.received)
        return self._scattered

    def all_gather(self) -> Work:
        """Of the parts of `received`, this rank's being its own."""
        own = self._codec_context.rank_chunk(self.received, self._codec_context.collectives.rank)
        self._gathered = self._codec_context.collectives.all_gather(self.received, own)
        return self._gathered

    def release_buffers(self) -> None:
        """All has been decoded."""
        for base, last in zip(self._buffers, (self._scattered, self._gathered), strict=True):
            self._codec_context.buffers.release(base, last)
