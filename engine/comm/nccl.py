"""The NCCL backend: native collectives, asynchronous on NCCL's own stream.

Ordering. A collective launched from the compute stream starts after everything enqueued there
before it. `wait` makes the compute stream, not the host, wait for the collective's end. So no
further events are needed: a collective that is launched after the last kernel that reads a buffer
may overwrite the buffer, and kernels enqueued after `wait` may read the result.

Rule of ordering: `nccl-waits` (docs/engine.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from rayzero.engine.comm.backend import AsyncWork, Backend, Work, copy_or_add_, rank_chunk

# torch 2.13 renames these; 2.11 has only the old names, and 2.13 warns when they are used.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class NcclBackend(Backend):
    """The backend of CUDA ranks. NCCL's kernels progress without the host."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._group = group
        self._subgroups: dict[range, dist.ProcessGroup] = {}  # created at first use

    def all_reduce(self, full: Tensor) -> Work:
        return AsyncWork([dist.all_reduce(full, group=self._group, async_op=True)])

    def reduce_scatter(self, full: Tensor, out: Tensor, *, accumulate: bool) -> Work:
        if not accumulate and out.dtype is full.dtype:
            return AsyncWork([_reduce_scatter(out, full, group=self._group, async_op=True)])
        own = rank_chunk(full, self.rank, self.world_size)
        work = _reduce_scatter(own, full, group=self._group, async_op=True)
        return AsyncWork([work], lambda: copy_or_add_(out, own, add=accumulate))

    def all_gather(self, full: Tensor, part: Tensor) -> Work:
        return AsyncWork([_all_gather(full, part, group=self._group, async_op=True)])

    def all_gather_in_group(self, full: Tensor, part: Tensor, members: range) -> Work:
        if members not in self._subgroups:  # collective: all ranks create all groups
            self._subgroups[members], _ = dist.new_subgroups(len(members), group=self._group)
        group = self._subgroups[members]
        return AsyncWork([_all_gather(full, part, group=group, async_op=True)])

    def all_to_all(self, full: Tensor, received: Tensor) -> Work:
        work = dist.all_to_all_single(received, full, group=self._group, async_op=True)
        return AsyncWork([work])

    def gather(self, full: Tensor, part: Tensor, target: int) -> Work:
        parts = list(full.chunk(self.world_size)) if self.rank == target else None
        work = dist.gather(part, parts, group=self._group, group_dst=target, async_op=True)
        return AsyncWork([work])

    def all_to_all_v(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Work:
        work = dist.all_to_all(list(received), list(sent), group=self._group, async_op=True)
        return AsyncWork([work])

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        work = dist.broadcast(tensor, group=self._group, group_src=source, async_op=True)
        return AsyncWork([work])
