"""The interfaces of communication: backends, the work that they start, operations over units.

Rule of ordering: `work-buffers` (docs/engine.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Waitable(Protocol):
    """An operation in flight, such as a torch work or a message."""

    def wait(self) -> object:
        """Returns when the operation is complete."""


class Work:
    """A collective in flight. This class itself is one that is complete.

    The collective's buffers must not be touched before `wait` has returned. Afterwards the result
    is available, but other ranks may still read the buffers that were passed in. These must not be
    overwritten before `release`, or the next vote.
    """

    def wait(self) -> None:
        """Returns when the result is available (on CUDA: to work enqueued on the current
        stream)."""

    def release(self) -> None:
        """Waits, and returns when no other rank reads this rank's buffers any more."""
        self.wait()


class ChainableWork(Work):
    """Work that runs callbacks once it has been waited for."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []

    def then(self, finish: Callable[[], None]) -> ChainableWork:
        """Runs `finish` once, at the end of the first `wait`, after earlier callbacks."""
        self._callbacks.append(finish)
        return self

    def _run_callbacks(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for finish in callbacks:
            finish()


class Backend(Protocol):
    """Moves data between the ranks of one generation, asynchronously. Implementations inherit it.

    `full` is a flat buffer of world_size equal parts, one for each rank in rank order.
    """

    rank: int
    world_size: int

    def all_reduce(self, full: Tensor) -> Work:
        """Sums `full` over the ranks, in place."""

    def reduce_scatter(self, full: Tensor, out: Tensor, *, accumulate: bool) -> Work:
        """Sums `full` over the ranks. This rank's part of the sum replaces `out`, or is added to
        it. `out` may be this rank's own part of `full`. The rest of `full` is left undefined.
        """

    def all_gather(self, full: Tensor, part: Tensor) -> Work:
        """Concatenates all ranks' `part`s in `full`, on every rank. `part` may be this rank's own
        part of `full`.
        """

    def all_gather_in_group(self, full: Tensor, part: Tensor, members: range) -> Work:
        """Does `all_gather` within a group of consecutive ranks that includes this one. All ranks
        call this method, with groups of one size. `full` has a part for each member.
        """

    def all_to_all(self, full: Tensor, received: Tensor) -> Work:
        """Sends each rank its part of `full`. Receives this rank's parts, in rank order."""

    def gather(self, full: Tensor, part: Tensor, target: int) -> Work:
        """Concatenates all ranks' `part`s in `full`, on rank `target` only."""

    def all_to_all_v(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Work:
        """Sends every rank's `sent[r]` to rank r, where it arrives in `received[sender]`. Tensors
        are flat and of one dtype. Their lengths may differ and be zero.
        """

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """Copies the source's `tensor` to every rank, in place."""

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a flat buffer for reductions and gathers: for their `full`, or a gather's `part`.
        The backend chooses its memory.
        """
        return torch.zeros(numel, dtype=dtype, device=device)

    def progress_pending(self) -> None:
        """Does this rank's share of all launched collectives, so that no peer waits for it."""
        return

    def abandon(self) -> None:
        """Forgets all launched collectives. The process group has ended, and with it the threads
        that waited for messages."""
        return

    @property
    def staging_bytes(self) -> int:
        """Bytes of receive buffers."""
        return 0


class ReduceOp(Protocol):
    """Reduces one unit's gradients over the ranks. `Collectives` does so uncompressed.

    Attributes:
        single_collective: each operation is one collective, whose `wait` may be called at once and
            on another stream. A compressed reduction runs kernels of its own in `wait`.
    """

    single_collective: bool

    def all_reduce(self, full: Tensor) -> ChainableWork: ...

    def reduce_scatter(
        self, full: Tensor, out: Tensor, *, accumulate: bool = False
    ) -> ChainableWork: ...


class GatherOp(Protocol):
    """All-gathers one unit's weights. `Collectives` does so uncompressed."""

    def all_gather(self, full: Tensor, part: Tensor) -> ChainableWork: ...


class AsyncWork(Work):
    """One or more torch works in flight, and a callback that `wait` runs when all are complete.
    Further calls of `wait` do nothing."""

    def __init__(self, works: Sequence[Waitable], finish: Callable[[], None] | None = None) -> None:
        self._works = works
        self._finish = finish

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = ()
        if self._finish is not None:
            self._finish()
            self._finish = None


def rank_chunk(full: Tensor, rank: int, world_size: int) -> Tensor:
    """Returns one rank's part of a flat buffer of equal parts, as a view."""
    length = full.numel() // world_size
    return full[rank * length : (rank + 1) * length]


def copy_unless_same(target: Tensor, source: Tensor) -> None:
    """Copies, unless both are the same memory."""
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


def copy_or_add_(out: Tensor, term: Tensor, *, add: bool) -> None:
    """Copies `term` to `out`, or adds it."""
    if add:
        out.add_(term)
    else:
        out.copy_(term)
