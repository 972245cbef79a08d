"""Gradient stores, on device or fetched to host.

Where a unit's gradients go as autograd hands them out.

A gradient is copied (the first of a step) or added into the unit's flat buffer and let go, which
costs one pass; accumulating into a zeroed `.grad` would cost three.

Gradients whose sums rest in host memory: fetched as they arrive, beside the rest of backward.

They are summed over the ranks where they are, on the device; what comes to the host is this rank's
part of the sum. In gradient accumulation the host adds where sums rest sharded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from rayzero.engine.comm.backend import ReduceOp, Work, copy_or_add_, rank_chunk
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.layout.flat_layout import UnitLayout
from rayzero.engine.offload.transfer import D2HCopy, HostTransfer, MemoryKind
from rayzero.engine.zero.parameters import param_views
from rayzero.engine.zero.placement import Collective


class GradStore(Protocol):
    """One unit's gradients on this rank."""

    @property
    def needs_buffer(self) -> bool:
        """Whether the next `take` has to find a slot first."""

    def accumulate(self, index: int, grad: Tensor, *, add: bool) -> None:
        """A gradient of parameter `index`, to be added to what is there or to replace it."""

    def accumulate_zero(self, index: int) -> None:
        """Parameter `index` had no part in the loss on this rank: its gradient is zero."""

    def reduce(self, sums: ReduceOp, *, first: bool) -> Work:
        """Starts to sum over the ranks. All parameters have been taken."""

    def on_reduced(self, summed: Work) -> None:
        """Called once after the pending sum has been waited for."""

    def owned(self) -> Tensor:
        """The main grads the optimizer of this rank uses, in the layout's coordinates."""

    def norm_part(self, shard: slice) -> Tensor:
        """This rank's part in the gradient norm: over all ranks, each element once."""

    @property
    def persistent_tensors(self) -> dict[MemoryKind, Tensor]:
        """What stays between two steps."""


class PartialGrads:
    """The whole unit, one buffer for good; summed over the ranks at the end of a step."""

    needs_buffer = False

    def __init__(self, layout: UnitLayout, flat: Tensor, owned: slice, how: Collective) -> None:
        self._flat = flat  # zeros: the padding is never written
        self._owned = flat[owned]
        self._collective = how
        self._views = param_views(layout, flat)

    def accumulate(self, index: int, grad: Tensor, *, add: bool) -> None:
        copy_or_add_(self._views[index], grad, add=add)

    def accumulate_zero(self, index: int) -> None:
        self._views[index].zero_()

    def reduce(self, sums: ReduceOp, *, first: bool) -> Work:
        if self._collective is Collective.ALL_REDUCE:
            return sums.all_reduce(self._flat)
        return sums.reduce_scatter(self._flat, self._owned)

    def on_reduced(self, summed: Work) -> None:
        return

    def owned(self) -> Tensor:
        return self._owned

    def norm_part(self, shard: slice) -> Tensor:
        return self._flat[shard]

    @property
    def persistent_tensors(self) -> dict[MemoryKind, Tensor]:
        return {MemoryKind.DEVICE: self._flat}


class GradBufferPool:
    """A few buffers that units' gradients pass through on their way into the shards.

    A slot belongs to a unit from its first gradient of a micro-step until its sum has been waited
    for. When all are taken, the reducer waits for the oldest sum under way; another slot is made
    only when none is under way, which is when gradients arrive out of order.

    Args:
        make: makes a slot: zeros, as long as the longest unit.
        count: how many may be made before waiting is tried.
    """

    def __init__(self, make: Callable[[], Tensor], count: int) -> None:
        self._make_buffer = make
        self._max_buffers = count
        self.buffers: list[Tensor] = []
        self._free: deque[tuple[Tensor, Work]] = deque()  # the one given back first comes first

    @property
    def exhausted(self) -> bool:
        return not self._free and len(self.buffers) >= self._max_buffers

    def acquire(self) -> Tensor:
        """A slot that no rank reads any more."""
        if not self._free:
            self.buffers.append(self._make_buffer())
            return self.buffers[-1]
        buffer, summed = self._free.popleft()
        summed.release()
        return buffer

    def release(self, buffer: Tensor, summed: Work) -> None:
        """`summed` is the sum that the slot's content went into; it has been waited for."""
        self._free.append((buffer, summed))


class ShardedGrads:
    """This rank's shard of the sum; whole gradients exist only in a slot, within a micro-step."""

    def __init__(self, layout: UnitLayout, shard: Tensor, slots: GradBufferPool) -> None:
        self._layout = layout
        self._shard = shard
        self._buffer_pool = slots
        self._buffer: Tensor | None = None  # being filled
        self._reducing: deque[Tensor] = deque()  # being summed, oldest first
        self._views: dict[int, list[Tensor]] = {}  # by the slot's address; slots live for good
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
            for gap in self._padding_views[key]:  # another unit's numbers may lie there
                gap.zero_()
        return self._views[self._buffer.data_ptr()]

    def reduce(self, sums: ReduceOp, *, first: bool) -> Work:
        self._buffer_views()
        slot, self._buffer = self._buffer, None
        if slot is None:
            raise RuntimeError("a unit was reduced without a slot")
        self._reducing.append(slot)
        return self._reduce_scatter(sums, slot[: self._layout.numel], first=first)

    def _reduce_scatter(self, sums: ReduceOp, full: Tensor, *, first: bool) -> Work:
        return sums.reduce_scatter(full, self._shard, accumulate=not first)

    def on_reduced(self, summed: Work) -> None:
        self._buffer_pool.release(self._reducing.popleft(), summed)

    def owned(self) -> Tensor:
        return self._shard

    def norm_part(self, shard: slice) -> Tensor:
        return self._shard

    @property
    def persistent_tensors(self) -> dict[MemoryKind, Tensor]:
        return {MemoryKind.DEVICE: self._shard}


class HostPartialGrads(PartialGrads):
    """The whole unit on the device for good, as without offload; the owned sum in host memory."""

    def __init__(
        self,
        layout: UnitLayout,
        flat: Tensor,
        owned: slice,
        how: Collective,
        host: Tensor,
        link: HostTransfer,
    ) -> None:
        super().__init__(layout, flat, owned, how)
        self.host = host
        self._start = owned.start
        self._transfer = link

    def reduce(self, sums: ReduceOp, *, first: bool) -> Work:
        summed = super().reduce(sums, first=first)
        return self._transfer.d2h(
            summed, D2HCopy(self._owned, self.host, False, _is_single_collective(sums))
        )

    def owned(self) -> Tensor:
        return self.host

    def norm_part(self, shard: slice) -> Tensor:
        self._transfer.wait_d2h()
        return self.host[shard.start - self._start : shard.stop - self._start]

    @property
    def persistent_tensors(self) -> dict[MemoryKind, Tensor]:
        return super().persistent_tensors | {MemoryKind.HOST: self.host}


class HostShardedGrads(ShardedGrads):
    """This rank's shard of the sum in host memory; the device has the slots only."""

    def __init__(
        self, layout: UnitLayout, host: Tensor, slots: GradBufferPool, link: HostTransfer
    ) -> None:
        super().__init__(layout, host, slots)
        self.host = host
        self._transfer = link

    def _reduce_scatter(self, sums: ReduceOp, full: Tensor, *, first: bool) -> Work:
        own = rank_chunk(full, sums.rank, sums.world_size)
        summed = sums.reduce_scatter(full, own)
        return self._transfer.d2h(
            summed, D2HCopy(own, self.host, not first, _is_single_collective(sums))
        )

    def norm_part(self, shard: slice) -> Tensor:
        self._transfer.wait_d2h()
        return self.host

    @property
    def persistent_tensors(self) -> dict[MemoryKind, Tensor]:
        return {MemoryKind.HOST: self.host}


def _is_single_collective(sums: ReduceOp) -> bool:
    return isinstance(sums, Collectives)
