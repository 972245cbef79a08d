"""The collectives the engine uses, one interface over NCCL, gloo, and no process group at all.

`Collectives` counts calls and bytes and numbers them; a backend moves the data. Bytes are counted
as the ZeRO paper does: a reduce-scatter or an all-gather moves the whole buffer once, an
all-reduce twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from rayzero.engine.errors import CollectiveError

T = TypeVar("T")


class Pending(Protocol):
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

    def all_reduce(self, full: Tensor) -> Pending:
        """Sums `full` over the ranks, in place."""

    def reduce_scatter(self, full: Tensor, out: Tensor, *, accumulate: bool) -> Pending:
        """Sums over the ranks; this rank's part replaces `out`, or is added to it.

        `out` may be this rank's own part of `full`. The rest of `full` is left undefined.
        """

    def all_gather(self, full: Tensor, part: Tensor) -> Pending:
        """All ranks' `part`s behind one another in `full`, on every rank.

        `part` may be this rank's own part of `full`.
        """

    def all_gather_among(self, full: Tensor, part: Tensor, members: range) -> Pending:
        """As `all_gather` among some consecutive ranks, of which this is one.

        All ranks call it, each with its own group of as many. `full` has a part for each member.
        """

    def all_to_all(self, full: Tensor, received: Tensor) -> Pending:
        """Each rank's part of `full` goes to that rank; `received` gets what they all had for this
        one, in the order of ranks."""

    def gather(self, full: Tensor, part: Tensor, target: int) -> Pending:
        """All ranks' `part`s behind one another in `full`, on rank `target` only."""

    def exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Pending:
        """Every rank's `sent[r]` to rank r, where it arrives in `received[sender]`.

        All are flat and of one dtype; lengths may differ and be zero. A rank's own is copied.
        """

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Gives every rank the source's `tensor`, in place."""

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer that reductions and gathers may be called on: `full`, or a gather's `part`.

        Where it lies is the backend's to choose.
        """

    def settle(self) -> None:
        """Does this rank's part of everything launched, so that no peer has to wait for it."""

    @property
    def staging_bytes(self) -> int:
        """Bytes of buffers held to receive into."""


class Sums(Protocol):
    """How one unit's gradients are summed over the ranks. `Collectives` is the plain way."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_reduce(self, full: Tensor) -> Pending:
        """See `Backend`."""

    def reduce_scatter(self, full: Tensor, out: Tensor, *, accumulate: bool = False) -> Pending:
        """See `Backend`."""


class Gathers(Protocol):
    """How one unit's weights are gathered from all ranks. `Collectives` is the plain way."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_gather(self, full: Tensor, part: Tensor) -> Pending:
        """See `Backend`."""


class Done:
    """A collective with nothing to wait for."""

    def wait(self) -> None:
        return

    def release(self) -> None:
        return


@dataclass
class Traffic:
    """What one kind of collective has moved so far."""

    calls: int = 0
    bytes: int = 0


@dataclass
class Counters:
    """Calls and bytes by collective, and the seconds the training thread stood waiting."""

    by_name: dict[str, Traffic] = field(default_factory=dict)
    sequence: int = 0
    exposed_s: float = 0.0

    def count(self, name: str, moved_bytes: int) -> None:
        traffic = self.by_name.setdefault(name, Traffic())
        traffic.calls += 1
        traffic.bytes += moved_bytes
        self.sequence += 1


class Collectives:
    """The engine's only way to other ranks.

    Attributes:
        watch: told (number, entered=) when a wait for other ranks begins and ends. What it raises
            breaks the collective off.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.counters = Counters()
        self.watch: Callable[[int, bool], None] = _nobody

    @property
    def rank(self) -> int:
        return self._backend.rank

    @property
    def world_size(self) -> int:
        return self._backend.world_size

    @property
    def staging_bytes(self) -> int:
        return self._backend.staging_bytes

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer for reductions and gathers."""
        return self._backend.zeros(numel, dtype, device)

    def settle(self) -> None:
        """Called before the user's code goes on, which may hold collectives of its own.

        Without it a peer could wait here for what this rank would only do later.
        """
        if self.world_size > 1:
            self.timed("an exchange", self.counters.sequence, self._backend.settle)

    def all_reduce(self, full: Tensor) -> Pending:
        return self._launch("all_reduce", 2 * full.nbytes, lambda: self._backend.all_reduce(full))

    def reduce_scatter(self, full: Tensor, out: Tensor, *, accumulate: bool = False) -> Pending:
        return self._launch(
            "reduce_scatter",
            full.nbytes,
            lambda: self._backend.reduce_scatter(full, out, accumulate=accumulate),
        )

    def all_gather(self, full: Tensor, part: Tensor) -> Pending:
        return self._launch("all_gather", full.nbytes, lambda: self._backend.all_gather(full, part))

    def all_gather_among(self, full: Tensor, part: Tensor, members: range) -> Pending:
        return self._launch(
            "all_gather_in_group",
            full.nbytes,
            lambda: self._backend.all_gather_among(full, part, members),
        )

    def all_to_all(self, full: Tensor, received: Tensor) -> Pending:
        moved = full.nbytes
        return self._launch("all_to_all", moved, lambda: self._backend.all_to_all(full, received))

    def gather(self, full: Tensor, part: Tensor, target: int = 0) -> Pending:
        moved = part.nbytes * self.world_size
        return self._launch("gather", moved, lambda: self._backend.gather(full, part, target))

    def exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Pending:
        moved = sum(one.nbytes for one in sent)
        return self._launch("exchange", moved, lambda: self._backend.exchange(received, sent))

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        def run() -> Pending:
            self._backend.broadcast(tensor, source)
            return Done()

        self._launch("broadcast", tensor.nbytes, run)

    def vote(self, scalars: Tensor) -> None:
        """Sums a few numbers over the ranks, in place, and waits for them."""
        self._launch("vote", scalars.nbytes, lambda: self._backend.all_reduce(scalars)).wait()

    def add_up(self, values: Tensor) -> None:
        """Sums a short vector over the ranks, in place, and waits for it."""
        self._launch("sums", values.nbytes, lambda: self._backend.all_reduce(values)).wait()

    def _launch(self, name: str, moved_bytes: int, run: Callable[[], Pending]) -> Pending:
        self.counters.count(name, moved_bytes)
        if self.world_size == 1:
            return run()
        number = self.counters.sequence
        return _Timed(name, number, self.timed(name, number, run), self)

    def timed(self, name: str, number: int, waits: Callable[[], T]) -> T:
        """Runs something that may wait for other ranks; a failure says what was going on."""
        start = perf_counter()
        self.watch(number, True)
        try:
            result = waits()
        except RuntimeError as error:
            raise CollectiveError(
                f"{name} failed on rank {self.rank} of {self.world_size} (collective {number}): "
                f"{error}"
            ) from error
        self.watch(number, False)
        self.counters.exposed_s += perf_counter() - start
        return result


class _Timed:
    """A pending collective whose waits are counted and watched."""

    def __init__(self, name: str, number: int, pending: Pending, owner: Collectives) -> None:
        self._name = name
        self._number = number
        self._pending = pending
        self._owner = owner

    def wait(self) -> None:
        self._owner.timed(self._name, self._number, self._pending.wait)

    def release(self) -> None:
        self._owner.timed(self._name, self._number, self._pending.release)


def _nobody(number: int, entered: bool) -> None:
    """There is nobody to tell of waits."""


def part_of(full: Tensor, rank: int, world_size: int) -> Tensor:
    """One rank's part of a flat buffer of equal parts."""
    length = full.numel() // world_size
    return full[rank * length : (rank + 1) * length]
