"""Quantized reduction over any backend: encode, exchange, decode.

A reduce-scatter is an all-to-all of payloads, each rank's part encoded separately, and a sum of the
decoded values in the order of ranks. An all-reduce adds an all-gather of the encoded sums; a rank
also decodes its own payload, so that all ranks get the same bits.

Error feedback adds the encoding error of a gradient to the next one (Seide et al. 2014; Karimireddy
et al. 2019). It is training state: summed over all ranks, it is the gradient not yet applied.

Order. A reduction has several collectives. Every rank must launch the same collectives in the same
order, but when a rank waits depends on its own timing. So a reduction's later collectives are
launched at the latest when the next reduction begins, and never before those of earlier ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayzero.engine.comm.backend import ChainableWork, CompletedWork, Work, rank_chunk
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.compression.codecs import Codec
from rayzero.engine.zero.reducer import ErrorFeedback


class PayloadBuffers:
    """Reused byte buffers for collectives, each as long as the largest requested so far. Once all
    are allocated, a step allocates nothing."""

    def __init__(self, collectives: Collectives, device: torch.device) -> None:
        self._collectives = collectives
        self._device = device
        self._largest_bytes = 0
        self._free: deque[tuple[Tensor, Work]] = deque()  # first in, first out
        self.total_bytes = 0

    def acquire(self, nbytes: int) -> Tensor:
        """A buffer of at least `nbytes` bytes, which no rank reads any more."""
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
        """`last` is the collective that read the buffer; it has been waited for."""
        self._free.append((buffer, last))


MAX_IN_FLIGHT = 4  # reductions; each holds payload buffers


class MultiStageReduce:
    """A reduction in flight: collectives, each launched when the one before it is complete."""

    def __init__(
        self,
        sequencer: CollectiveSequencer,
        launches: Sequence[Callable[[], Work]],
        finish: Callable[[], None],
    ) -> None:
        self._sequencer = sequencer
        self._remaining_stages = deque(launches)
        self._current = self._remaining_stages.popleft()()
        self._callbacks = [finish]

    def then(self, finish: Callable[[], None]) -> MultiStageReduce:
        self._callbacks.append(finish)
        return self

    def wait(self) -> None:
        if self.finished:
            return
        self._sequencer.launch_through(self)
        self._current.wait()
        callbacks, self._callbacks = self._callbacks, []
        for finish in callbacks:
            finish()

    def release(self) -> None:
        """As `wait`: other ranks read payload buffers only, which `PayloadBuffers` releases."""
        self.wait()

    @property
    def finished(self) -> bool:
        return not self._callbacks

    def launch_remaining(self) -> None:
        while self._remaining_stages:
            self._current.wait()
            self._current = self._remaining_stages.popleft()()


class CollectiveSequencer:
    """The reductions in flight on this rank, oldest first."""

    def __init__(self) -> None:
        self._in_flight: deque[MultiStageReduce] = deque()

    def start(
        self, launches: Sequence[Callable[[], Work]], finish: Callable[[], None]
    ) -> MultiStageReduce:
        """Starts a reduction.

        Args:
            launches: start its collectives; each is called when the one before is complete.
            finish: computes the result after the last one.
        """
        for earlier in self._in_flight:
            earlier.launch_remaining()
        while self._in_flight and (
            self._in_flight[0].finished or len(self._in_flight) >= MAX_IN_FLIGHT
        ):
            self._in_flight.popleft().wait()
        work = MultiStageReduce(self, launches, finish)
        self._in_flight.append(work)
        return work

    def launch_through(self, last: MultiStageReduce) -> None:
        """Launches the remaining collectives of all reductions up to this one."""
        if last not in self._in_flight:  # it left the queue with everything launched
            return
        for work in self._in_flight:
            work.launch_remaining()
            if work is last:
                return


@dataclass(frozen=True)
class CodecContext:
    """State that all quantized reductions of an engine share."""

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
        """Payload bytes of all parts of `full`, each encoded separately."""
        ranks = self.collectives.world_size
        return ranks * self.codec.payload_bytes(full.numel() // ranks)

    def sum_payloads(self, received: Tensor, out: Tensor, *, accumulate: bool) -> None:
        """Decodes and sums the payloads that all ranks sent for one part."""
        for rank in self.ranks:
            self.codec.decode(self.rank_chunk(received, rank), out, add=accumulate or rank > 0)

    def encode(self, values: Tensor, payload: Tensor, residual: Tensor | None) -> None:
        """Encodes one part. With feedback, `residual` is first added to `values`, then replaced."""
        if residual is None:
            self.codec.encode(values, payload)
            return
        values.add_(residual)
        self.codec.encode(values, payload)
        self.codec.decode(payload, residual, add=False)
        torch.sub(values, residual, out=residual)


class QuantizedReduce:
    """Reduces one unit's gradients in encoded form. See `ReduceOp`; `full` is left undefined.

    Args:
        padding: the unit's. A codec that cannot represent zero would write values there.
        feedback: residuals; None without error feedback.
    """

    single_collective = False

    def __init__(
        self, context: CodecContext, padding: Sequence[slice], feedback: ErrorFeedback | None
    ) -> None:
        self.rank = context.collectives.rank
        self.world_size = context.collectives.world_size
        self._codec_context = context
        self._padding = () if context.codec.keeps_zero else tuple(padding)
        self.feedback = feedback

    def reduce_scatter(
        self, full: Tensor, out: Tensor, *, accumulate: bool = False
    ) -> ChainableWork:
        context, exchange = self._codec_context, self._encode_chunks(full)

        def finish() -> None:
            context.sum_payloads(exchange.received, out, accumulate=accumulate)
            self._zero_padding(out, context.collectives.rank * out.numel())
            exchange.release_buffers()

        return context.sequencer.start([exchange.all_to_all], finish)

    def all_reduce(self, full: Tensor) -> ChainableWork:
        context, exchange = self._codec_context, self._encode_chunks(full)
        rank = context.collectives.rank
        own, residual = (
            context.rank_chunk(full, rank),
            self.feedback.reduced if self.feedback else None,
        )

        def gather() -> Work:
            context.sum_payloads(exchange.received, own, accumulate=False)
            self._zero_padding(own, rank * own.numel())
            context.encode(own, context.rank_chunk(exchange.received, rank), residual)
            if residual is not None:
                self._zero_padding(residual, rank * own.numel())
            return exchange.all_gather()

        def finish() -> None:
            for peer in context.ranks:
                context.codec.decode(
                    context.rank_chunk(exchange.received, peer),
                    context.rank_chunk(full, peer),
                    add=False,
                )
            self._zero_padding(full, 0)
            exchange.release_buffers()

        return context.sequencer.start([exchange.all_to_all, gather], finish)

    def _encode_chunks(self, full: Tensor) -> _PayloadExchange:
        context = self._codec_context
        exchange = _PayloadExchange(context, context.total_payload_bytes(full))
        residuals = self.feedback.local if self.feedback else None
        for rank in context.ranks:
            residual = None if residuals is None else context.rank_chunk(residuals, rank)
            context.encode(
                context.rank_chunk(full, rank), context.rank_chunk(exchange.sent, rank), residual
            )
        if residuals is not None:
            self._zero_padding(residuals, 0)
        return exchange

    def _zero_padding(self, values: Tensor, start: int) -> None:
        """Zeroes the padding in `values`, which begin at `start` of the unit's flat layout."""
        for span in self._padding:
            first, last = max(span.start - start, 0), min(span.stop - start, values.numel())
            if first < last:
                values[first:last].zero_()


class _PayloadExchange:
    """The buffers of one quantized reduction: a part for each rank, sent and received."""

    def __init__(self, context: CodecContext, nbytes: int) -> None:
        self._codec_context = context
        self._buffers = context.buffers.acquire(nbytes), context.buffers.acquire(nbytes)
        self.sent, self.received = (base[:nbytes] for base in self._buffers)
        self._scattered: Work = CompletedWork()
        self._gathered: Work = CompletedWork()

    def all_to_all(self) -> Work:
        self._scattered = self._codec_context.collectives.all_to_all(self.sent, self.received)
        return self._scattered

    def all_gather(self) -> Work:
        """Gathers the parts of `received`; this rank contributes its own part."""
        own = self._codec_context.rank_chunk(self.received, self._codec_context.collectives.rank)
        self._gathered = self._codec_context.collectives.all_gather(self.received, own)
        return self._gathered

    def release_buffers(self) -> None:
        """Called when everything has been decoded."""
        for base, last in zip(self._buffers, (self._scattered, self._gathered), strict=True):
            self._codec_context.buffers.release(base, last)
