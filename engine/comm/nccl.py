"""The NCCL backend: native collectives, asynchronous on NCCL's own stream.

Ordering. A collective launched from the compute stream starts after everything enqueued there
before it, and `wait` makes the compute stream (not the host) wait for its end. So a buffer may be
overwritten by a collective that is launched after the last kernel that reads it, and read by
kernels enqueued after `wait`, without further events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rayzero.engine.comm.backend import Work, copy_or_add_, rank_chunk

# torch 2.13 renames these; 2.11 has only the old names, and 2.13 warns when they are used.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _NcclWork:
    """A collective on NCCL's stream, and a callback that enqueues work after it."""

    def __init__(self, work: dist.Work, finish: Callable[[], None] | None = None) -> None:
        self._work: dist.Work | None = work
        self._finish = finish

    def wait(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        if self._finish is not None:
            self._finish()
            self._finish = None

    def release(self) -> None:
        self.wait()


class NcclBackend:
    """CUDA ranks."""

    staging_bytes = 0

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._group = group
        self._subgroups: dict[
            range, dist.ProcessGroup
        ] = {}  # of consecutive ranks, created at first use

    def all_reduce(self, full: Tensor) -> Work:
        return _NcclWork(dist.all_reduce(full, group=self._group, async_op=True))

    def reduce_scatter(self, full: Tensor, out: Tensor, *, accumulate: bool) -> Work:
        if not accumulate and out.dtype is full.dtype:
            return _NcclWork(_reduce_scatter(out, full, group=self._group, async_op=True))
        own = rank_chunk(full, self.rank, self.world_size)
        work = _reduce_scatter(own, full, group=self._group, async_op=True)
        return _NcclWork(work, lambda: copy_or_add_(out, own, add=accumulate))

    def all_gather(self, full: Tensor, part: Tensor) -> Work:
        return _NcclWork(_all_gather(full, part, group=self._group, async_op=True))

    def all_gather_in_group(self, full: Tensor, part: Tensor, members: range) -> Work:
        if members not in self._subgroups:
            self._subgroups[members] = self._subgroup(len(members))
        group = self._subgroups[members]
        return _NcclWork(_all_gather(full, part, group=group, async_op=True))

    def _subgroup(self, size: int) -> dist.ProcessGroup:
        """This rank's group of `size` consecutive ranks. Collective: all ranks create all
        groups."""
        own: dist.ProcessGroup
        own, _ = dist.new_subgroups(size, group=self._group)
        return own

    def all_to_all(self, full: Tensor, received: Tensor) -> Work:
        return _NcclWork(dist.all_to_all_single(received, full, group=self._group, async_op=True))

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def progress_pending(self) -> None:
        return  # NCCL's kernels progress without the host

    def gather(self, full: Tensor, part: Tensor, target: int) -> Work:
        parts = None
        if self.rank == target:
            parts = [rank_chunk(full, rank, self.world_size) for rank in range(self.world_size)]
        work = dist.gather(part, parts, group=self._group, group_dst=target, async_op=True)
        return _NcclWork(work)

    def all_to_all_v(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Work:
        return _NcclWork(
            dist.all_to_all(list(received), list(sent), group=self._group, async_op=True)
        )

    def broadcast(self, tensor: Tensor, source: int) -> None:
        dist.broadcast(tensor, group=self._group, group_src=source)
