"""Gradient stores: one unit's main gradients, on the device or in host memory.

A gradient is copied (the first of a step) or added into the unit's flat buffer and freed, which
costs one pass over memory; accumulating into a zeroed `.grad` would cost three.

With offload, gradients are reduced on the device, and this rank's part of the result is copied to
the host during the rest of backward. When accumulating, the host adds sharded results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from rayzero.engine.comm.backend import ChainableWork, ReduceOp, Work, copy_or_add_, rank_chunk
from rayzero.engine.layout.flat_layout import UnitLayout
from rayzero.engine.offload.transfer import HostTransfer, MemoryKind
from rayzero.engine.zero.parameters import param_views
from rayzero.engine.zero.placement import Collective


class GradStore(Protocol):
    """One unit's gradients on this rank."""

    @property
    def needs_buffer(self) -> bool:
        """Whether the next `accumulate` needs a buffer from the pool first."""

    def accumulate(self, index: int, grad: Tensor, *, add: bool) -> None:
        """Adds a gradient of parameter `index` to its main gradient, or replaces it."""

    def accumulate_zero(self, index: int) -> None:
        """Parameter `index` was not used in the loss on this rank: its gradient is zero."""

    def reduce(self, *, first: bool) -> Work:
        """Starts to reduce over the ranks. All parameters have been accumulated."""

    def on_reduced(self, work: Work) -> None:
        """Called once, when `work` has been waited for."""

    def owned(self) -> Tensor:
        """The main gradients of the range that this rank's optimizer updates."""

    def norm_part(self, shard: slice) -> Tensor:
        """This rank's part of the gradient norm: over all ranks, each element once."""

    @property
    def persistent_tensors(self) -> dict[MemoryKind, Tensor]:
        """The memory held between two steps."""


class PartialGrads:
    """The full unit in one persistent buffer; reduced over the ranks at the end of a step."""

    needs_buffer = False

    def __init__(
        self,
        layout: UnitLayout,
        flat: Tensor,
        owned: slice,
        collective: Collective,
        reduce_op: ReduceOp,
    ) -> None:
        self._flat = flat  # zeros: the padding is never written
        self._owned = flat[owned]
        self._collective = collective
        self._reduce_op = reduce_op
        self._views = param_views(layout, flat)

    def accumulate(self, index: int, grad: Tensor, *, add: bool) -> None:
        copy_or_add_(self._views[index], grad, add=add)

    def accumulate_zero(self, index: int) -> None:
        self._views[index].zero_()

    def reduce(self, *, first: bool) -> Work:
        return self._start_reduce()

    def _start_reduce(self) -> ChainableWork:
        if self._collective is Collective.ALL_REDUCE:
            return self._reduce_op.all_reduce(self._flat)
        return self._reduce_op.reduce_scatter(self._flat, self._owned)

    def on_reduced(self, work: Work) -> None:
        return

    def owned(self) -> Tensor:
        return self._owned

    def norm_part(self, shard: slice) -> Tensor:
        return self._flat[shard]

    @property
    def persistent_tensors(self) -> dict[MemoryKind, Tensor]:
        return {MemoryKind.DEVICE: self._flat}


class GradBufferPool:
    """A few buffers from which units' gradients are reduced into shards.

    A unit holds a buffer from its first gradient of a micro-step until its reduction has been
    waited for. When all are in use, the reducer waits for the oldest reduction in flight; another
    buffer is allocated only if none is in flight, when gradients arrive out of order.

    Args:
        make: allocates a buffer: zeros, as long as the longest unit.
        count: buffers to allocate before waiting instead.
    """

    def __init__(self, make: Callable[[], Tensor], count: int) -> None:
        self._make_buffer = make
        self._max_buffers = count
        self.buffers: list[Tensor] = []
        self._free: deque[tuple[Tensor, Work]] = deque()  # first in, first out

    @property
    def exhausted(self) -> bool:
        return not self._free and len(self.buffers) >= self._max_buffers

    def acquire(self) -> Tensor:
        """A buffer that no rank reads any more."""
        if not self._free:
            self.buffers.append(self._make_buffer())
            return self.buffers[-1]
        buffer, work = self._free.popleft()
        work.release()
        return buffer

    def release(self, buffer: Tensor, work: Work) -> None:
        """`work` is the reduction that read the buffer; it has been waited for."""
        self._free.append((buffer, work))


class ShardedGrads:
    """This rank's shard of the sum; full gradients exist only in a pool buffer, within a
    micro-step."""

    def __init__(
        self, layout: UnitLayout, shard: Tensor, buffers: GradBufferPool, reduce_op: ReduceOp
    ) -> None:
        self._layout = layout
        self._reduce_op = reduce_op
        self._shard = shard
        self._buffer_pool = buffers
        self._buffer: Tensor | None = None  # being filled
        self._reducing: deque[Tensor] = deque()  # being reduced, oldest first
        self._views: dict[int, list[Tensor]] = {}  # by the buffer's address, which is never reused
        self._padding_views: dict[int, list[Tensor]] = {}

    @property
    def needs_buffer(self) -> bool:
        return self._buffer is None

    def accumulate(self, index: int, grad: Tensor, *, add: bool) -> None:
        copy_or_add_(self._buffer_views()[index], grad, add=add)

    def accumulate_zero(self, index: int) -> None:
        self._buffer_views()[index].zero_()

    def _buffer_views(self) -> list[Tensor]:
        if self._buffer is None:
            self._buffer = self._buffer_pool.acquire()
            key = self._buffer.data_ptr()
            if key not in self._views:
                self._views[key] = param_views(self._layout, self._buffer)
                self._padding_views[key] = [self._buffer[gap] for gap in self._layout.padding]
            for gap in self._padding_views[key]:  # another unit used the buffer before
                gap.zero_()
        return self._views[self._buffer.data_ptr()]

    def reduce(self, *, first: bool) -> Work:
        self._buffer_views()
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            raise RuntimeError("a unit was reduced without a buffer")
        self._reducing.append(buffer)
        return self._reduce_scatter(buffer[: self._layout.numel], first=first)

    def _reduce_scatter(self, full: Tensor, *, first: bool) -> Work:
        return self._reduce_op.reduce_scatter(full, self._shard, accumulate=not first)

    def on_reduced(self, work: Work) -> None:
        self._buffer_pool.release(self._reducing.popleft(), work)

    def owned(self) -> Tensor:
        return self._shard

    def norm_part(self, shard: slice) -> Tensor:
        return self._shard

    @property
    def persistent_tensors(self) -> dict[MemoryKind, Tensor]:
        return {MemoryKind.DEVICE: self._shard}


class HostPartialGrads(PartialGrads):
    """The full unit stays on the device, as without offload; the owned part of the sum is in host
    memory."""

    def __init__(
        self,
        layout: UnitLayout,
        flat: Tensor,
        owned: slice,
        collective: Collective,
        reduce_op: ReduceOp,
        host: Tensor,
        transfer: HostTransfer,
    ) -> None:
        super().__init__(layout, flat, owned, collective, reduce_op)
        self.host = host
        self._start = owned.start
        self._transfer = transfer

    def reduce(self, *, first: bool) -> Work:
        early = self._reduce_op.single_collective
        reduced = self._start_reduce()
        return self._transfer.d2h(reduced, self._owned, self.host, add=False, early=early)

    def owned(self) -> Tensor:
        return self.host

    def norm_part(self, shard: slice) -> Tensor:
        self._transfer.wait_d2h()
        return self.host[shard.start - self._start : shard.stop - self._start]

    @property
    def persistent_tensors(self) -> dict[MemoryKind, Tensor]:
        return super().persistent_tensors | {MemoryKind.HOST: self.host}


class HostShardedGrads(ShardedGrads):
    """This rank's shard of the sum in host memory; the device has only the pool's buffers."""

    def __init__(
        self,
        layout: UnitLayout,
        host: Tensor,
        buffers: GradBufferPool,
        reduce_op: ReduceOp,
        transfer: HostTransfer,
    ) -> None:
        super().__init__(layout, host, buffers, reduce_op)
        self.host = host
        self._transfer = transfer

    def _reduce_scatter(self, full: Tensor, *, first: bool) -> Work:
        op = self._reduce_op
        own = rank_chunk(full, op.rank, op.world_size)
        reduced = op.reduce_scatter(full, own)
        early = op.single_collective
        return self._transfer.d2h(reduced, own, self.host, add=not first, early=early)

    def norm_part(self, shard: slice) -> Tensor:
        self._transfer.wait_d2h()
        return self.host

    @property
    def persistent_tensors(self) -> dict[MemoryKind, Tensor]:
        return {MemoryKind.HOST: self.host}
