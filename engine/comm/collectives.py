"""The engine's collectives: one interface over NCCL, gloo, and a single rank.

`Collectives` counts, numbers and times them; a backend moves the data. Bytes are counted as in the
ZeRO paper: a reduce-scatter or an all-gather moves the buffer once, an all-reduce twice.

`run_on_all_ranks` runs work that succeeds on all ranks or fails on all of them.

Rule of ordering: `same-calls` (docs/engine.md).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from rayzero.engine.comm.backend import Backend, ChainableWork, Work
from rayzero.engine.device import get_device
from rayzero.engine.errors import CollectiveError, EngineError

T = TypeVar("T")

DETACHED = "the ranks have changed since the batch of this step was read, which is read again"


@dataclass
class CollectiveStats:
    """Calls and bytes of one kind of collective so far."""

    calls: int = 0
    bytes: int = 0


@dataclass
class CommCounters:
    """Calls and bytes by collective, and the seconds the training thread has waited."""

    by_name: defaultdict[str, CollectiveStats] = field(
        default_factory=lambda: defaultdict(CollectiveStats)
    )
    sequence: int = 0
    exposed_s: float = 0.0


class Collectives:
    """The engine's only connection to other ranks.

    A process group is *broken* once a collective of it has failed, or it is ended from outside
    (`break_off`). With `on_broken`, that is a state within a training step (`in_step`): collectives
    complete at once with what is in their buffers, so that forward and backward run on. Results are
    then undefined; `sum_scalars`, whose result the host acts upon, raises CollectiveError, as every
    collective does outside of a training step, and everywhere without `on_broken`.

    Attributes:
        in_step: a training step is running: from its first forward to the end of its `step()`.
        detached: this rank computes on its own for a while: as in a broken group, but no peer
            notices.
        broken: why the group is broken; empty if it is not.
        on_broken: called once for each group, with the reason, by the thread that noticed. It ends
            this rank's connections, so that no peer waits for what this rank does not send.
        wait_observer: called with (number, entered) when a wait for other ranks begins and ends; an
            exception that it raises aborts the collective.
    """

    single_collective = True
    broken = ""
    in_step = False
    detached = False

    def __init__(self, backend: Backend) -> None:
        self.counters = CommCounters()
        self.on_broken: Callable[[str], None] | None = None
        self.wait_observer: Callable[[int, bool], None] | None = None
        self._breaking = Lock()
        self.reconnect(backend)

    def abandon(self) -> None:
        """Stops waiting for what was launched: the process group is gone."""
        self._backend.abandon()

    def reconnect(self, backend: Backend) -> None:
        """Uses the backend of another process group from now on. The previous one is abandoned."""
        self._backend = backend
        self.rank = backend.rank
        self.world_size = backend.world_size
        self.broken = ""
        self.in_step = self.detached = False

    def break_off(self, reason: str) -> None:
        """The group is broken from now on. By any thread: the flag is set before the group is
        aborted, so that nothing is launched on it afterwards."""
        with self._breaking:
            is_first = not self.broken
            self.broken = self.broken or reason
        if is_first and self.on_broken is not None:
            self.on_broken(reason)

    @property
    def staging_bytes(self) -> int:
        return self._backend.staging_bytes

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer for reductions and gathers."""
        return self._backend.zeros(numel, dtype, device)

    def progress_pending(self) -> None:
        """Called before returning to the script, which may call collectives itself.

        Without it a peer could wait for this rank's share of an exchange while this rank waits in
        the script's collective.
        """
        sequence, progress = self.counters.sequence, self._backend.progress_pending
        self.run_timed("an exchange", sequence, progress, _nothing)

    def all_reduce(self, full: Tensor) -> CollectiveWork:
        return self._launch("all_reduce", 2 * full.nbytes, self._backend.all_reduce, full)

    def reduce_scatter(
        self, full: Tensor, out: Tensor, *, accumulate: bool = False
    ) -> CollectiveWork:
        start = partial(self._backend.reduce_scatter, accumulate=accumulate)
        return self._launch("reduce_scatter", full.nbytes, start, full, out)

    def all_gather(self, full: Tensor, part: Tensor) -> CollectiveWork:
        return self._launch("all_gather", full.nbytes, self._backend.all_gather, full, part)

    def all_gather_in_group(self, full: Tensor, part: Tensor, members: range) -> CollectiveWork:
        start = self._backend.all_gather_in_group
        return self._launch("all_gather_in_group", full.nbytes, start, full, part, members)

    def all_to_all(self, full: Tensor, received: Tensor) -> CollectiveWork:
        return self._launch("all_to_all", full.nbytes, self._backend.all_to_all, full, received)

    def gather(self, full: Tensor, part: Tensor, target: int = 0) -> CollectiveWork:
        moved = part.nbytes * self.world_size
        return self._launch("gather", moved, self._backend.gather, full, part, target)

    def all_to_all_v(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> CollectiveWork:
        moved = sum(part.nbytes for part in sent)
        return self._launch("exchange", moved, self._backend.all_to_all_v, received, sent)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Copies the source's contiguous tensor to every rank, and waits for it."""
        self.start_broadcast(tensor, source).wait()

    def start_broadcast(self, tensor: Tensor, source: int) -> CollectiveWork:
        # As bytes: backends lack some dtypes, NCCL int16 and complex numbers.
        data = tensor.detach().view(-1).view(torch.uint8)
        return self._launch("broadcast", data.nbytes, self._backend.broadcast, data, source)

    def sum_scalars(
        self, scalars: Tensor, numbers: Sequence[float] = (), name: str = "vote"
    ) -> list[float]:
        """Sums a few numbers over the ranks, and returns the sums: those of the float64 `scalars`
        on the device, then those of `numbers`. The host waits; counted by `name`.

        Raises CollectiveError if the group is broken, or if not every rank was counted: a group
        that is aborted lets its kernels end early, with undefined results.
        """
        ballot, work = self._launch_sum(scalars, numbers, name)
        *sums, ranks = work.to_host(ballot).tolist()
        if self.broken:
            raise CollectiveError(self.broken)
        if ranks == self.world_size:
            return sums
        error = CollectiveError(
            f"{name} was aborted on rank {self.rank} (collective {self.counters.sequence}): it has "
            f"summed over {ranks:g} of {self.world_size} ranks"
        )
        if self.on_broken is not None:  # else every later collective fails by itself
            self.break_off(error.seen)
        raise error

    def sum_on_device(self, scalars: Tensor) -> Tensor:
        """`sum_scalars` whose result stays on the device: undefined if the group is aborted, so
        callers must look for an interrupt before they rely on it."""
        ballot, work = self._launch_sum(scalars, (), "sums")
        work.wait()
        return ballot[:-1].view_as(scalars)

    def _launch_sum(
        self, scalars: Tensor, numbers: Sequence[float], name: str
    ) -> tuple[Tensor, CollectiveWork]:
        sent = get_device(scalars.device).send([*numbers, 1.0], torch.float64)
        ballot = torch.cat((scalars.view(-1), sent))
        return ballot, self._launch(name, ballot.nbytes, self._backend.all_reduce, ballot)

    def _launch(
        self, name: str, moved_bytes: int, start: Callable[..., Work], *arguments: Any
    ) -> CollectiveWork:
        counters = self.counters
        traffic = counters.by_name[name]
        traffic.calls += 1
        traffic.bytes += moved_bytes
        counters.sequence = number = counters.sequence + 1
        work = self.run_timed(name, number, partial(start, *arguments), Work)
        return CollectiveWork(work, self, name, number)

    def run_timed(
        self, name: str, number: int, waits: Callable[[], T], broken: Callable[[], T]
    ) -> T:
        """Runs something that may wait for other ranks; `broken` in its place if the group is, in a
        training step. A failure names the collective."""
        if self.world_size == 1:
            return waits()
        if self.broken or self.detached:
            if not self.in_step:
                raise CollectiveError(self.broken or DETACHED)
            return broken()
        observe, start = self.wait_observer, perf_counter()
        if observe is not None:
            observe(number, True)
        try:
            result = waits()
        except RuntimeError as error:
            failure = CollectiveError(
                f"{name} failed on rank {self.rank} of {self.world_size} (collective {number}): "
                f"{error}"
            )
            if self.on_broken is None:
                raise failure from error
            self.break_off(failure.seen)
            if not self.in_step:
                raise failure from error
            return broken()
        if observe is not None:
            observe(number, False)
        self.counters.exposed_s += perf_counter() - start
        return result


class CollectiveWork(ChainableWork):
    """The work that `Collectives` returns: waits are timed and observed, and callbacks follow."""

    def __init__(self, work: Work, collectives: Collectives, name: str, number: int) -> None:
        super().__init__()
        self._work = work
        self._collectives = collectives
        self._name = name
        self._number = number

    def to_host(self, result: Tensor) -> Tensor:
        """Waits, and returns the result in host memory. On a GPU only this copy makes the host
        wait, so it is timed and observed: the observer can raise before the undefined result of an
        aborted collective is used."""

        def wait_and_copy() -> Tensor:
            self._work.wait()
            return copy()

        def copy() -> Tensor:
            return get_device(result.device).to_host(result)

        return self._collectives.run_timed(self._name, self._number, wait_and_copy, copy)

    def wait(self) -> None:
        self._collectives.run_timed(self._name, self._number, self._work.wait, _nothing)
        self._run_callbacks()

    def release(self) -> None:
        if self._callbacks:
            self.wait()
        self._collectives.run_timed(self._name, self._number, self._work.release, _nothing)


def _nothing() -> None:
    return


def run_on_all_ranks(
    collectives: Collectives, device: torch.device, work: Callable[[], Any]
) -> list[Any]:
    """Runs `work` on every rank and returns the results by rank. Collective.

    If it fails on one rank it fails on all of them, so that none waits forever.

    Args:
        device: one that the group's backend can read from.
        work: returns a JSON value. It must not call collectives.

    Raises:
        Whatever `work` raised here; EngineError with the first failure's text elsewhere.
    """
    failure: Exception | None = None
    try:
        outcome = {"result": work()}
    except Exception as error:  # noqa: BLE001  raised below, once the other ranks know
        failure, outcome = error, {"error": str(error)}
    messages = _all_gather_bytes(collectives, json.dumps(outcome).encode(), device)
    if failure is not None:
        raise failure
    outcomes = [json.loads(message) for message in messages]
    for rank, other in enumerate(outcomes):
        if "error" in other:
            raise EngineError(f"rank {rank} failed: {other['error']}")
    return [other["result"] for other in outcomes]


def _all_gather_bytes(
    collectives: Collectives, message: bytes, device: torch.device
) -> list[bytes]:
    """Each rank's message, which is not empty, on every rank. Collective."""
    if collectives.world_size == 1:
        return [message]
    lengths = torch.zeros(collectives.world_size, dtype=torch.float64, device=device)
    lengths[collectives.rank] = len(message)
    messages = []
    for rank, length in enumerate(collectives.sum_scalars(lengths)):
        own = message if rank == collectives.rank else bytes(int(length))
        buffer = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
        result = collectives.start_broadcast(buffer, rank).to_host(buffer)
        messages.append(result.numpy().tobytes())
    return messages
