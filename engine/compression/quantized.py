"""Quantized reduction over any backend: encode, exchange, decode.

A reduce-scatter is an all-to-all of payloads, each rank's part encoded separately, and a sum of the
decoded values in the order of ranks. An all-reduce adds an all-gather of the encoded sums. A rank
also decodes its own payload, so that all ranks get the same bits.

Error feedback adds the encoding error of a gradient to the next gradient (Seide et al. 2014;
Karimireddy et al. 2019). The error is training state: its sum over all ranks is the part of the
gradient that was not yet applied.

Order. A reduction has several collectives. Every rank must launch the same collectives in the same
order, but when a rank waits depends on its own timing. So a reduction's later collectives are
launched at the latest when the next reduction begins, and never before those of earlier reductions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from rayzero.engine.comm.backend import ChainableWork, Work
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.compression.codecs import Codec
from rayzero.engine.zero.grad_reduction import ErrorFeedback

MAX_IN_FLIGHT = 4  # reductions at a time, since each occupies payload buffers


class PayloadBuffers:
    """Reused byte buffers for collectives, each as long as the largest requested so far. Once all
    are allocated, a step allocates nothing."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._largest_bytes = 0
        self._free: deque[tuple[Tensor, Work]] = deque()  # first in, first out
        self.total_bytes = 0

    def acquire(self, nbytes: int) -> Tensor:
        """Returns a buffer of at least `nbytes` bytes that no rank reads any more."""
        self._largest_bytes = max(self._largest_bytes, nbytes)
        for index, (buffer, last) in enumerate(self._free):
            if buffer.numel() >= nbytes:
                del self._free[index]
                last.release()
                return buffer
        buffer = self._collectives.zeros(self._largest_bytes, torch.uint8)
        self.total_bytes += buffer.nbytes
        return buffer

    def release(self, buffer: Tensor, last: Work) -> None:
        """Returns a buffer to the pool. `last` is the collective that read it, which has been
        waited for."""
        self._free.append((buffer, last))


Finish = Callable[[Sequence[Work]], None]


class MultiStageReduce(ChainableWork):
    """A reduction in flight. Each of its collectives is launched when the one before is complete.
    `works` are the launched collectives. `finish` gets them at the end.

    `release` is the same as `wait`: other ranks only read payload buffers, and `PayloadBuffers`
    releases these."""

    def __init__(self, launches: Sequence[Callable[[], Work]], finish: Finish) -> None:
        super().__init__()
        self._remaining_stages = deque(launches)
        self.works = [self._remaining_stages.popleft()()]
        self.then(partial(finish, self.works))

    def wait(self) -> None:
        if self.finished:
            return
        self.launch_remaining()
        self.works[-1].wait()
        self._run_callbacks()

    @property
    def finished(self) -> bool:
        return not self._callbacks

    def launch_remaining(self) -> None:
        while self._remaining_stages:
            self.works[-1].wait()
            self.works.append(self._remaining_stages.popleft()())


class CollectiveSequencer:
    """Starts reductions, and holds those in flight on this rank, oldest first. All collectives of
    all reductions except the last have been launched."""

    def __init__(self) -> None:
        self._in_flight: deque[MultiStageReduce] = deque()

    def start(self, launches: Sequence[Callable[[], Work]], finish: Finish) -> MultiStageReduce:
        """Starts a reduction.

        Args:
            launches: start the collectives. Each is called when the one before is complete.
            finish: computes the result after the last collective, given the works of all.
        """
        if self._in_flight:
            self._in_flight[-1].launch_remaining()
        while self._in_flight and (
            self._in_flight[0].finished or len(self._in_flight) >= MAX_IN_FLIGHT
        ):
            self._in_flight.popleft().wait()
        work = MultiStageReduce(launches, finish)
        self._in_flight.append(work)
        return work


class CodecContext:
    """The settings and buffers that all quantized reductions of an engine share."""

    def __init__(self, codec: Codec, collectives: Collectives) -> None:
        self.codec = codec
        self.collectives = collectives
        self.buffers = PayloadBuffers(collectives)
        self.sequencer = CollectiveSequencer()


class QuantizedReduce:
    """Reduces one unit's gradients in encoded form. See `ReduceOp`. `full` is left undefined.

    Args:
        padding: the unit's padding, where a codec that cannot represent zero would write values.
        feedback: the residuals. None without error feedback.
    """

    single_collective = False

    def __init__(
        self, context: CodecContext, padding: Sequence[slice], feedback: ErrorFeedback | None
    ) -> None:
        self._collectives = context.collectives
        self.rank = context.collectives.rank
        self.world_size = context.collectives.world_size
        self._context = context
        self._codec = context.codec
        self._padding = () if context.codec.keeps_zero else tuple(padding)
        self.feedback = feedback

    def reduce_scatter(
        self, full: Tensor, out: Tensor, *, accumulate: bool = False
    ) -> ChainableWork:
        def finish(received: Tensor) -> None:
            self._sum_payloads(received, out, accumulate=accumulate)
            self._zero_padding(out, self.rank * out.numel())

        return self._start(full, None, finish)

    def all_reduce(self, full: Tensor) -> ChainableWork:
        parts = full.view(self.world_size, -1)
        own, start = parts[self.rank], self.rank * parts.shape[1]
        residual = self.feedback.reduced if self.feedback else None

        def gather(received: Tensor) -> Work:
            self._sum_payloads(received, own, accumulate=False)
            self._zero_padding(own, start)
            self._encode(own, received[self.rank], residual)
            if residual is not None:
                self._zero_padding(residual, start)
            return self._collectives.all_gather(received.view(-1), received[self.rank])

        def finish(received: Tensor) -> None:
            for part, payload in zip(parts, received, strict=True):
                self._codec.decode(payload, part, add=False)
            self._zero_padding(full, 0)

        return self._start(full, gather, finish)

    def _start(
        self,
        full: Tensor,
        gather: Callable[[Tensor], Work] | None,
        finish: Callable[[Tensor], None],
    ) -> ChainableWork:
        """Encodes `full`, and starts to exchange the payloads. The received payloads have one row
        for each rank. `gather` starts a second collective from them. `finish` gets the result."""
        parts, pool = full.view(self.world_size, -1), self._context.buffers
        nbytes = self.world_size * self._codec.payload_bytes(parts.shape[1])
        buffers = [pool.acquire(nbytes), pool.acquire(nbytes)]
        sent, received = (buffer[:nbytes].view(self.world_size, -1) for buffer in buffers)
        residuals = self.feedback.local.view_as(parts) if self.feedback else [None] * len(parts)
        for part, payload, residual in zip(parts, sent, residuals, strict=True):
            self._encode(part, payload, residual)
        if self.feedback is not None:
            self._zero_padding(self.feedback.local, 0)

        def exchange() -> Work:
            return self._collectives.all_to_all(sent.view(-1), received.view(-1))

        def finish_and_release(works: Sequence[Work]) -> None:
            finish(received)
            readers = [*works, Work()]  # without a gather, no other rank reads `received`
            for buffer, last in zip(buffers, readers, strict=False):
                pool.release(buffer, last)

        launches: list[Callable[[], Work]] = [exchange]
        if gather is not None:
            launches.append(partial(gather, received))
        return self._context.sequencer.start(launches, finish_and_release)

    def _encode(self, values: Tensor, payload: Tensor, residual: Tensor | None) -> None:
        """Encodes one part. With feedback, `residual` is added to `values`, then replaced."""
        if residual is not None:
            values.add_(residual)
        self._codec.encode(values, payload)
        if residual is not None:
            self._codec.decode(payload, residual, add=False)
            torch.sub(values, residual, out=residual)

    def _sum_payloads(self, received: Tensor, out: Tensor, *, accumulate: bool) -> None:
        """Decodes and sums the payloads that all ranks sent for a part, in the order of ranks."""
        for rank, payload in enumerate(received):
            self._codec.decode(payload, out, add=accumulate or rank > 0)

    def _zero_padding(self, values: Tensor, start: int) -> None:
        """Zeroes the padding in `values`, which begin at `start` in the unit's flat layout."""
        for span in self._padding:
            first, last = max(span.start - start, 0), min(span.stop - start, values.numel())
            if first < last:
                values[first:last].zero_()
