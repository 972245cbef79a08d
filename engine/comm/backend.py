"""Protocols: Work, Backend, ReduceOp, GatherOp (half of collectives.py) + small helpers.

Something to do when a collective has arrived.

Where a term of a sum goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Work(Protocol):
    """A collective under way. Its buffers must not be touched before `wait` has returned.

    Afterwards the result is there. What was given may still be read by other ranks: it must not be
    overwritten before `release`, or the next vote.
    """

    def wait(self) -> None:
        """Returns when the result is there (on CUDA: when the current stream will see it)."""

    def release(self) -> None:
        """Returns when no other rank reads this rank's buffers any more."""


class Backend(Protocol):
    """Moves data between the ranks of one generation. All calls are asynchronous but `broadcast`.

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
        """All ranks' `part`s behind one another in `full`, on every rank.

        `part` may be this rank's own part of `full`.
        """

    def all_gather_in_group(self, full: Tensor, part: Tensor, members: range) -> Work:
        """As `all_gather` among some consecutive ranks, of which this is one.

        All ranks call it, each with its own group of as many. `full` has a part for each member.
        """

    def all_to_all(self, full: Tensor, received: Tensor) -> Work:
        """Each rank's part of `full` goes to that rank; `received` gets what they all had for this
        one, in the order of ranks."""

    def gather(self, full: Tensor, part: Tensor, target: int) -> Work:
        """All ranks' `part`s behind one another in `full`, on rank `target` only."""

    def all_to_all_v(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Work:
        """Every rank's `sent[r]` to rank r, where it arrives in `received[sender]`.

        All are flat and of one dtype; lengths may differ and be zero. A rank's own is copied.
        """

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Gives every rank the source's `tensor`, in place."""

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer that reductions and gathers may be called on: `full`, or a gather's `part`.

        Where it lies is the backend's to choose.
        """

    def progress_pending(self) -> None:
        """Does this rank's part of everything launched, so that no peer has to wait for it."""

    @property
    def staging_bytes(self) -> int:
        """Bytes of buffers held to receive into."""


class ReduceOp(Protocol):
    """Reduces one unit's gradients over the ranks. `Collectives` does so uncompressed.

    Attributes:
        single_collective: an operation is one collective, whose `wait` may be called at once and on
            another stream. A compressed reduction runs kernels of its own when it is waited for.
    """

    single_collective: bool

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_reduce(self, full: Tensor) -> Work:
        """See `Backend`."""

    def reduce_scatter(self, full: Tensor, out: Tensor, *, accumulate: bool = False) -> Work:
        """See `Backend`."""


class GatherOp(Protocol):
    """How one unit's weights are gathered from all ranks. `Collectives` is the plain way."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_gather(self, full: Tensor, part: Tensor) -> Work:
        """See `Backend`."""


class CompletedWork:
    """A collective with nothing to wait for."""

    def wait(self) -> None:
        return

    def release(self) -> None:
        return


def rank_chunk(full: Tensor, rank: int, world_size: int) -> Tensor:
    """One rank's part of a flat buffer of equal parts."""
    length = full.numel() // world_size
    return full[rank * length : (rank + 1) * length]


class ChainedWork:
    """A pending collective, and what is done once when it has been waited for."""

    def __init__(self, pending: Work, finish: Callable[[], None]) -> None:
        self._work = pending
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        self._work.wait()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def release(self) -> None:
        self.wait()
        self._work.release()


def copy_or_add_(out: Tensor, term: Tensor, *, add: bool) -> None:
    """`term` replaces `out`, or is added to it."""
    if add:
        out.add_(term)
    else:
        out.copy_(term)
