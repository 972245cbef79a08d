"""The interfaces of communication: a backend, the work that it starts, and operations over
units.

Rule of ordering: `work-buffers` (docs/engine.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Waitable(Protocol):
    """Something in flight: a torch work, a message."""

    def wait(self) -> object:
        """Returns when it is complete."""


class Work:
    """A collective in flight, by default one that is complete. Its buffers must not be touched
    before `wait` has returned.

    Afterwards the result is available. Other ranks may still read what was passed in: it must not
    be overwritten before `release`, or the next vote.
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

    `full` is a flat buffer of world_size equal parts; a rank's own part is `full[rank]` of them.
    """

    rank: int
    world_size: int

    def all_reduce(self, full: Tensor) -> Work:
        """Sums `full` over the ranks, in place."""

    def reduce_scatter(self, full: Tensor, out: Tensor, *, accumulate: bool) -> Work:
        """Sums over the ranks; this rank's part replaces `out`, or is added to it.

        `out` may be this rank's own part of `full`. The rest of `full` is left undefined.
        """

    def all_gather(self, full: Tensor, part: Tensor) -> Work:
        """Concatenates all ranks' `part`s in `full`, on every rank.

        `part` may be this rank's own part of `full`.
        """

    def all_gather_in_group(self, full: Tensor, part: Tensor, members: range) -> Work:
        """`all_gather` within a group of consecutive ranks that includes this one.

        All ranks call it, with groups of one size. `full` has a part for each member.
        """

    def all_to_all(self, full: Tensor, received: Tensor) -> Work:
        """Sends each rank its part of `full`; `received` gets the parts for this rank, in rank
        order."""

    def gather(self, full: Tensor, part: Tensor, target: int) -> Work:
        """Concatenates all ranks' `part`s in `full`, on rank `target` only."""

    def all_to_all_v(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Work:
        """Every rank's `sent[r]` to rank r, where it arrives in `received[sender]`.

        All are flat and of one dtype; lengths may differ and be zero. A rank's own is copied.
        """

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """Copies the source's `tensor` to every rank, in place."""

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer that reductions and gathers may be called on: `full`, or a gather's `part`.

        The backend chooses its memory.
        """
        return torch.zeros(numel, dtype=dtype, device=device)

    def progress_pending(self) -> None:
        """Does this rank's share of everything launched, so that no peer waits for it."""
        return

    def abandon(self) -> None:
        """Forgets everything launched. The group is gone: no thread of it waits for messages."""
        return

    @property
    def staging_bytes(self) -> int:
        """Bytes of receive buffers."""
        return 0


class ReduceOp(Protocol):
    """Reduces one unit's gradients over the ranks. `Collectives` does so uncompressed.

    Attributes:
        single_collective: an operation is one collective, whose `wait` may be called at once and on
            another stream. A compressed reduction runs kernels of its own when it is waited for.
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
    """Torch's works in flight, and a callback for when all are complete. Waits once."""

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
    """One rank's part of a flat buffer of equal parts; a view."""
    length = full.numel() // world_size
    return full[rank * length : (rank + 1) * length]


def copy_unless_same(target: Tensor, source: Tensor) -> None:
    """Copies, unless both are the same memory."""
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


def copy_or_add_(out: Tensor, term: Tensor, *, add: bool) -> None:
    """`term` replaces `out`, or is added to it."""
    if add:
        out.add_(term)
    else:
        out.copy_(term)
