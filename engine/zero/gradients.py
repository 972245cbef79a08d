"""Gradient stores: one unit's main gradients, on the device or in host memory.

A gradient is copied (the first of a step) or added into the unit's flat buffer and freed, which
costs one pass over memory; accumulating into a zeroed `.grad` would cost three.

With offload, gradients are reduced on the device, and this rank's part of the result is copied to
the host during the rest of backward. When accumulating, the host adds sharded results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from torch import Tensor

from rayzero.engine.comm.backend import ChainableWork, ReduceOp, Work, copy_or_add_
from rayzero.engine.layout.flat_layout import UnitLayout
from rayzero.engine.offload.transfer import HostTransfer, MemoryKind
from rayzero.engine.zero.parameters import param_views
from rayzero.engine.zero.placement import Collective


class GradStore(ABC):
    """One unit's gradients on this rank.

    Args:
        main: the main gradients of the range that this rank's optimizer updates.
        transfer: copies them to `main` in host memory; None if `main` is on the device.
    """

    def __init__(self, main: Tensor, reduce_op: ReduceOp, transfer: HostTransfer | None) -> None:
        self._main = main
        self._reduce_op = reduce_op
        self._transfer = transfer

    @property
    def needs_buffer(self) -> bool:
        """Whether the next `accumulate` needs a buffer from the pool first."""
        return False

    @abstractmethod
    def _views(self) -> list[Tensor]:
        """Where each parameter's gradient is accumulated."""

    def accumulate(self, index: int, grad: Tensor, *, add: bool) -> None:
        """Adds a gradient of parameter `index` to its main gradient, or replaces it."""
        copy_or_add_(self._views()[index], grad, add=add)

    def accumulate_zero(self, index: int) -> None:
        """Parameter `index` was not used in the loss on this rank: its gradient is zero."""
        self._views()[index].zero_()

    @abstractmethod
    def reduce(self, *, first: bool) -> Work:
        """Starts to reduce over the ranks. All parameters have been accumulated."""

    def on_reduced(self, work: Work) -> None:
        """Called once, when `work` has been waited for."""
        return

    def owned(self) -> Tensor:
        """The main gradients; waits for copies to host memory."""
        if self._transfer is not None:
            self._transfer.wait_d2h()
        return self._main

    @property
    def persistent_tensors(self) -> dict[MemoryKind, Tensor]:
        """The memory held between two steps."""
        kind = MemoryKind.DEVICE if self._transfer is None else MemoryKind.HOST
        return {kind: self._main}

    def _copy_to_host(self, reduced: ChainableWork, source: Tensor, *, add: bool) -> Work:
        """Copies or adds what was reduced to `main`, unless it is there."""
        if self._transfer is None:
            return reduced
        early = self._reduce_op.single_collective
        return self._transfer.d2h(reduced, source, self._main, add=add, early=early)


class PartialGrads(GradStore):
    """The full unit in one persistent buffer; reduced over the ranks at the end of a step. `flat`
    is that buffer, zeros: the padding is never written."""

    def __init__(
        self,
        layout: UnitLayout,
        flat: Tensor,
        owned: slice,
        collective: Collective,
        reduce_op: ReduceOp,
        transfer: HostTransfer | None = None,
    ) -> None:
        part = flat[owned]
        main = part if transfer is None else transfer.host_zeros(part.numel(), part.dtype)
        super().__init__(main, reduce_op, transfer)
        self._flat = flat
        self._owned = part
        self._collective = collective
        self._param_views = param_views(layout, flat)

    def _views(self) -> list[Tensor]:
        return self._param_views

    def reduce(self, *, first: bool) -> Work:
        if self._collective is Collective.ALL_REDUCE:
            work = self._reduce_op.all_reduce(self._flat)
        else:
            work = self._reduce_op.reduce_scatter(self._flat, self._owned)
        return self._copy_to_host(work, self._owned, add=False)

    @property
    def persistent_tensors(self) -> dict[MemoryKind, Tensor]:
        return super().persistent_tensors | {MemoryKind.DEVICE: self._flat}


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


class ShardedGrads(GradStore):
    """This rank's shard of the sum; full gradients exist only in a pool buffer, within a
    micro-step."""

    def __init__(
        self,
        layout: UnitLayout,
        shard: Tensor,
        owned: slice,
        buffers: GradBufferPool,
        reduce_op: ReduceOp,
        transfer: HostTransfer | None = None,
    ) -> None:
        super().__init__(shard, reduce_op, transfer)
        self._owned = owned
        self._layout = layout
        self._buffer_pool = buffers
        self._buffer: Tensor | None = None  # being filled
        self._reducing: deque[Tensor] = deque()  # being reduced, oldest first
        self._param_views: dict[int, list[Tensor]] = {}  # by the buffer's address, never reused
        self._padding_views: dict[int, list[Tensor]] = {}

    @property
    def needs_buffer(self) -> bool:
        return self._buffer is None

    def _views(self) -> list[Tensor]:
        if self._buffer is None:
            self._buffer = self._buffer_pool.acquire()
            key = self._buffer.data_ptr()
            if key not in self._param_views:
                self._param_views[key] = param_views(self._layout, self._buffer)
                self._padding_views[key] = [self._buffer[gap] for gap in self._layout.padding]
            for gap in self._padding_views[key]:  # another unit used the buffer before
                gap.zero_()
        return self._param_views[self._buffer.data_ptr()]

    def reduce(self, *, first: bool) -> Work:
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            raise RuntimeError("a unit was reduced without a buffer")
        self._reducing.append(buffer)
        full, op = buffer[: self._layout.numel], self._reduce_op
        if self._transfer is None:
            return op.reduce_scatter(full, self._main, accumulate=not first)
        own = full[self._owned]
        return self._copy_to_host(op.reduce_scatter(full, own), own, add=not first)

    def on_reduced(self, work: Work) -> None:
        self._buffer_pool.release(self._reducing.popleft(), work)
