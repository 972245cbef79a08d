"""Gradient stores, which hold one unit's main gradients on the device or in host memory, and the
buffers from which gradients are reduced into shards.

A unit's gradients stay in the tensors that autograd made until all of them have arrived. Then one
call copies them (in a step's first micro-step) or adds them (later): into the unit's flat buffer,
or, part by part, into a buffer from which they are reduced into shards.

Lifetime. Gradients are dropped once the copy that reads them has been launched. On a GPU the copy
may still run then. Autograd allocated the gradients on the stream on which the copy is enqueued,
and the caching allocator gives their memory to later work of that stream only. So no
`record_stream` and no wait is needed.

With offload, gradients are reduced on the device, and this rank's part of the result is copied to
the host during the rest of backward. Sharded results of several micro-steps are added on the host.

Rule of ordering: `gradient-buffers` (docs/engine.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rayzero.engine.comm.backend import ChainableWork, ReduceOp, Work, rank_chunk
from rayzero.engine.layout.flat_layout import UnitLayout
from rayzero.engine.layout.parts import Segment, cut_columns, segments
from rayzero.engine.offload.transfer import HostTransfer, MemoryKind
from rayzero.engine.zero.parameters import param_views
from rayzero.engine.zero.placement import Collective

Grads = list[Tensor | None]  # by parameter; None for zeros


@dataclass(eq=False, slots=True)
class GradBuffer:
    """Memory from which parts of units are reduced in turn. `reduction` is the latest reduction."""

    tensor: Tensor
    reduction: Work = field(default_factory=Work)


class GradBufferPool:
    """A few buffers from which parts of units are reduced into shards, used in turn.

    A part occupies a buffer from the launch of its reduction until the buffer's next use, which
    waits for that reduction. If all buffers are in use, the one with the oldest reduction is next.

    Args:
        make: allocates a buffer of zeros, given the number of elements.
        count: the most buffers to allocate. Fewer are allocated if there are fewer parts.
        part_numel: the most elements of a part, without padding.

    Attributes:
        numel: elements of a buffer: those of the longest part announced before the first `acquire`.
        max_count: the most buffers that will be allocated.
    """

    def __init__(self, make: Callable[[int], Tensor], count: int, part_numel: int) -> None:
        self.part_numel = part_numel
        self.numel = 0
        self.max_count = 0
        self._make_buffer = make
        self._count = count
        self._ring: deque[GradBuffer] = deque()  # the most recently used buffer is the last

    @property
    def buffers(self) -> list[Tensor]:
        return [buffer.tensor for buffer in self._ring]

    def announce(self, parts: int, numel: int) -> None:
        """Announces that a unit will need `parts` buffers of `numel` elements."""
        self.numel = max(self.numel, numel)
        self.max_count = min(self._count, self.max_count + parts)

    def acquire(self) -> GradBuffer:
        """Returns a buffer that no rank reads any more."""
        if len(self._ring) < self.max_count:
            buffer = GradBuffer(self._make_buffer(self.numel))
        else:
            buffer = self._ring.popleft()
            buffer.reduction.release()
        self._ring.append(buffer)
        return buffer


class GradStore(ABC):
    """One unit's gradients on this rank.

    Args:
        main: the main gradients of the range that this rank's optimizer updates.
        transfer: copies reduced gradients to `main` in host memory. None if `main` is on the
            device.

    Attributes:
        part_count: how many reductions a unit takes.
    """

    part_count = 1

    def __init__(self, main: Tensor, reduce_op: ReduceOp, transfer: HostTransfer | None) -> None:
        self._main = main
        self._reduce_op = reduce_op
        self._transfer = transfer

    @property
    def dtype(self) -> torch.dtype:
        return self._main.dtype

    @abstractmethod
    def collect(self, grads: Grads, *, add: bool) -> None:
        """Takes the gradients of all parameters, which replace those held or are added to them. The
        tensors belong to the store from now on."""

    @abstractmethod
    def reduce(self, part: int, *, first: bool) -> Work:
        """Starts to reduce a part of the collected gradients. Called for every part, in order."""

    def release(self) -> None:
        """Returns when no other rank reads the collected gradients."""
        return

    def local(self, index: int) -> Tensor | None:
        """Returns this rank's own sum of a parameter's gradients before their reduction, in any
        shape. None if only reduced gradients are held."""
        return None

    def owned(self) -> Tensor:
        """Waits for copies to host memory, and returns the main gradients."""
        if self._transfer is not None:
            self._transfer.wait_d2h()
        return self._main

    @property
    def persistent_tensors(self) -> dict[MemoryKind, Tensor]:
        """The memory held between two steps."""
        kind = MemoryKind.DEVICE if self._transfer is None else MemoryKind.HOST
        return {kind: self._main}

    def _copy_to_host(
        self, reduced: ChainableWork, source: Tensor, target: Tensor, *, add: bool
    ) -> Work:
        """Copies or adds reduced gradients to a part of `main` in host memory. Returns `reduced`
        itself if `main` is on the device."""
        if self._transfer is None:
            return reduced
        early = self._reduce_op.single_collective
        return self._transfer.d2h(reduced, source, target, add=add, early=early)


class PartialGrads(GradStore):
    """The full unit's gradients in one persistent buffer, reduced over the ranks at the end of a
    step.

    Args:
        flat: the buffer, filled with zeros. Its padding is never written.
        shard: this rank's shard of the unit.
    """

    def __init__(
        self,
        layout: UnitLayout,
        flat: Tensor,
        owned: slice,
        collective: Collective,
        reduce_op: ReduceOp,
        transfer: HostTransfer | None = None,
        *,
        shard: slice,
    ) -> None:
        part = flat[owned]
        main = part if transfer is None else transfer.host_zeros(part.numel(), part.dtype)
        super().__init__(main, reduce_op, transfer)
        self._flat = flat
        self._owned = part
        self._collective = collective
        self._param_views = param_views(layout, flat)
        self._others = [flat[: shard.start], flat[shard.stop :]]
        self._reduction: Work | None = None  # of the held gradients; None until it is started

    def release(self) -> None:
        if self._reduction is not None:
            self._reduction.release()
            self._reduction = None

    def local(self, index: int) -> Tensor | None:
        return self._param_views[index] if self._reduction is None else None

    def collect(self, grads: Grads, *, add: bool) -> None:
        if add and self._reduction is not None:
            # Each rank keeps its shard of the reduced sum, and sets the rest to zero. The ranks'
            # terms then still add up to that sum, so the next reduction adds the gradients that
            # are collected from now on. No copy is made.
            self.release()
            torch._foreach_zero_(self._others)
        self._reduction = None
        if not add:
            _copy_at_once(self._param_views, grads)
            return
        pairs = zip(self._param_views, grads, strict=True)
        given = [(view, grad) for view, grad in pairs if grad is not None]
        if given:
            views, terms = zip(*given, strict=True)
            torch._foreach_add_(views, terms)

    def reduce(self, part: int, *, first: bool) -> Work:
        if self._collective is Collective.ALL_REDUCE:
            work = self._reduce_op.all_reduce(self._flat)
        else:
            work = self._reduce_op.reduce_scatter(self._flat, self._owned)
        self._reduction = self._copy_to_host(work, self._owned, self._main, add=False)
        return self._reduction

    @property
    def persistent_tensors(self) -> dict[MemoryKind, Tensor]:
        return super().persistent_tensors | {MemoryKind.DEVICE: self._flat}


@dataclass(frozen=True)
class _PartViews:
    """Views of one part in one pool buffer.

    Attributes:
        full: the whole part.
        targets: the segments of parameters, or whole parameters if the unit is one part.
        padding: the padding.
        own: this rank's columns.
        out: this rank's columns in the main gradients, not in the buffer.
    """

    full: Tensor
    targets: list[Tensor]
    padding: list[Tensor]
    own: Tensor
    out: Tensor


class ShardedGrads(GradStore):
    """This rank's shard of the summed gradients.

    Full gradients exist only within a micro-step: in the tensors that autograd made, and one part
    at a time in a pool buffer. A compressed reduction works on a whole unit, because its residuals
    are in the unit's layout. It therefore gets the unit as one part.
    """

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
        self._rank = owned.start // layout.shard_numel
        self._layout = layout
        self._buffer_pool = buffers
        may_cut = reduce_op.single_collective
        self._parts = cut_columns(layout, buffers.part_numel if may_cut else layout.logical_numel)
        self.part_count = len(self._parts)
        self._segments = [list(self._part_segments(columns)) for columns in self._parts]
        buffers.announce(self.part_count, layout.world_size * self._parts[0].stop)
        self._grads: Grads = []
        self._views: list[dict[GradBuffer, _PartViews]] = [{} for _ in self._parts]

    def collect(self, grads: Grads, *, add: bool) -> None:
        self._grads = grads

    def reduce(self, part: int, *, first: bool) -> Work:
        buffer = self._buffer_pool.acquire()
        views = self._views[part].get(buffer)
        if views is None:
            views = self._views[part][buffer] = self._make_views(buffer.tensor, part)
        _copy_at_once(views.targets, self._grads if self.part_count == 1 else self._sources(part))
        if views.padding:  # another part may have written there
            torch._foreach_zero_(views.padding)
        if part == self.part_count - 1:
            self._grads = []
        op = self._reduce_op
        out = views.out
        add = not first
        if self._transfer is None:
            buffer.reduction = op.reduce_scatter(views.full, out, accumulate=add)
        else:
            reduced = op.reduce_scatter(views.full, views.own)
            buffer.reduction = self._copy_to_host(reduced, views.own, out, add=add)
        return buffer.reduction

    def _part_segments(self, columns: slice) -> Iterator[tuple[int, Segment]]:
        """Yields (parameter index, segment) for each segment of a part."""
        for index in range(len(self._layout.params)):
            for segment in segments(self._layout, self._layout.param_range(index), columns):
                yield index, segment

    def _make_views(self, buffer: Tensor, part: int) -> _PartViews:
        columns = self._parts[part]
        full = buffer[: self._layout.world_size * (columns.stop - columns.start)]
        if self.part_count == 1:
            targets = param_views(self._layout, full)
        else:
            targets = [segment.in_part(full) for _, segment in self._segments[part]]
        padding = [
            segment.in_part(full)
            for gap in self._layout.padding
            for segment in segments(self._layout, gap, columns)
        ]
        own = rank_chunk(full, self._rank, self._layout.world_size)
        return _PartViews(full, targets, padding, own, self._main[columns])

    def _sources(self, part: int) -> list[Tensor | None]:
        """Returns the gradients' elements in each segment of a part. None for a missing one."""
        flat = [None if grad is None else grad.reshape(-1) for grad in self._grads]
        sources: list[Tensor | None] = []
        for index, segment in self._segments[part]:
            grad = flat[index]
            sources.append(None if grad is None else segment.in_source(grad))
        return sources


def _copy_at_once(targets: list[Tensor], sources: Grads) -> None:
    """Copies every source to its target, and zeros the targets whose source is None. Two calls at
    most, whatever the number of tensors; on a GPU a few kernels."""
    given = [source for source in sources if source is not None]
    if len(given) < len(sources):
        pairs = list(zip(targets, sources, strict=True))
        torch._foreach_zero_([target for target, source in pairs if source is None])
        targets = [target for target, source in pairs if source is not None]
    if given:
        torch._foreach_copy_(targets, given)
