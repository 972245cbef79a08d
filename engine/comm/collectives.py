"""The engine's collectives: one interface over NCCL, gloo, and a single rank.

`Collectives` counts, numbers and times collectives. A backend moves the data. Bytes are counted as
in the ZeRO paper: a reduce-scatter or an all-gather moves the buffer once, an all-reduce twice.

`run_on_all_ranks` runs a function that succeeds on all ranks or fails on all of them.

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

_CPU = torch.device("cpu")

DETACHED = "the ranks have changed since the batch of this step was read, which is read again"


@dataclass
class CollectiveStats:
    """Calls and bytes of one kind of collective so far."""

    calls: int = 0
    bytes: int = 0


@dataclass
class CommCounters:
    """Calls and bytes by collective, the number of the present process group's latest one
    (`sequence`), and the seconds that the training thread has waited (`exposed_s`)."""

    by_name: defaultdict[str, CollectiveStats] = field(
        default_factory=lambda: defaultdict(CollectiveStats)
    )
    sequence: int = 0
    exposed_s: float = 0.0


class Collectives:
    """The engine's only connection to other ranks.

    A process group is *broken* once one of its collectives has failed, or `break_off` was called.
    Without `on_broken`, every collective of a broken group raises CollectiveError. With it, they
    only raise outside of a training step. Within a step (`in_step`) they complete at once with the
    content of their buffers, so that forward and backward can finish. Results are then undefined.
    `sum_scalars` raises even then, because the host acts upon its result.

    Attributes:
        in_step: a training step is running: from its first forward to the end of its `step()`.
        detached: this rank computes without its peers for a while. Collectives do as in a broken
            group, but no peer notices.
        device: this rank's device, which the backend can read from.
        broken: the reason why the group is broken. Empty if it is not.
        on_broken: called once for each group, with the reason, by the thread that noticed. It ends
            this rank's connections, so that no peer waits for what this rank does not send.
        wait_observer: called with (number, entered) when a wait for other ranks begins and ends. An
            exception that it raises aborts the collective.
    """

    single_collective = True
    broken = ""
    in_step = False
    detached = False

    def __init__(self, backend: Backend, device: torch.device = _CPU) -> None:
        self.device = device
        self.counters = CommCounters()
        self.on_broken: Callable[[str], None] | None = None
        self.wait_observer: Callable[[int, bool], None] | None = None
        self._breaking = Lock()
        self.reconnect(backend)

    def abandon(self) -> None:
        """Forgets launched collectives. The process group has ended."""
        self._backend.abandon()

    def reconnect(self, backend: Backend) -> None:
        """Uses the backend of another process group from now on. The previous one is abandoned.
        Numbers collectives from 1 again, as the new ranks do."""
        self._backend = backend
        self.counters.sequence = 0
        self.rank = backend.rank
        self.world_size = backend.world_size
        self.broken = ""
        self.in_step = self.detached = False

    def break_off(self, reason: str) -> None:
        """Marks the group as broken. Called by any thread. The flag is set before the group is
        aborted, so that nothing is launched on it afterwards."""
        with self._breaking:
            is_first = not self.broken
            self.broken = self.broken or reason
        if is_first and self.on_broken is not None:
            self.on_broken(reason)

    @property
    def staging_bytes(self) -> int:
        return self._backend.staging_bytes

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a flat buffer of zeros for reductions and gathers."""
        return self._backend.zeros(numel, dtype, self.device)

    def progress_pending(self) -> None:
        """Does this rank's share of all launched collectives. Called before returning to the
        script, which may call collectives itself. A peer could otherwise wait for this rank's share
        of an exchange while this rank waits in the script's collective.
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
        """Sums a few numbers over the ranks. Returns the sums of the float64 `scalars` on the
        device, then those of `numbers`. The host waits. Counted as a collective `name`.

        Raises CollectiveError if the group is broken, or if the sum is not over every rank. The
        latter happens when a group is aborted: its kernels end early, with undefined results.
        """
        terms, work = self._launch_sum(scalars, numbers, name)
        *sums, ranks = work.to_host(terms).tolist()
        if self.broken:
            raise CollectiveError(self.broken)
        if ranks == self.world_size:
            return sums
        error = CollectiveError(
            f"{name} was aborted on rank {self.rank} (collective {self.counters.sequence}): it has "
            f"summed over {ranks:g} of {self.world_size} ranks"
        )
        if self.on_broken is not None:  # without it, every later collective fails by itself
            self.break_off(error.seen)
        raise error

    def sum_numbers(self, numbers: Sequence[float], name: str = "vote") -> list[float]:
        """Does `sum_scalars` without any on the device."""
        nothing = torch.zeros(0, dtype=torch.float64, device=self.device)
        return self.sum_scalars(nothing, numbers, name)

    def sum_on_device(self, scalars: Tensor) -> Tensor:
        """Does `sum_scalars` with a result that stays on the device. The result is undefined if the
        group is aborted, so callers must check for an interrupt before they rely on it."""
        terms, work = self._launch_sum(scalars, (), "sums")
        work.wait()
        return terms[:-1].view_as(scalars)

    def _launch_sum(
        self, scalars: Tensor, numbers: Sequence[float], name: str
    ) -> tuple[Tensor, CollectiveWork]:
        """Starts to sum the given numbers and, last, a 1, which counts the ranks."""
        sent = get_device(scalars.device).send([*numbers, 1.0], torch.float64)
        terms = torch.cat((scalars.view(-1), sent))
        return terms, self._launch(name, terms.nbytes, self._backend.all_reduce, terms)

    def _launch(
        self, name: str, moved_bytes: int, start: Callable[..., Work], *arguments: Any
    ) -> CollectiveWork:
        counters = self.counters
        traffic = counters.by_name[name]
        traffic.calls += 1
        traffic.bytes += moved_bytes
        if not self.detached:  # else the peers do not call it
            counters.sequence += 1
        number = counters.sequence
        work = self.run_timed(name, number, partial(start, *arguments), Work)
        return CollectiveWork(work, self, name, number)

    def run_timed(
        self, name: str, number: int, waits: Callable[[], T], broken: Callable[[], T]
    ) -> T:
        """Calls `waits`, which may wait for other ranks. Within a training step, calls `broken`
        instead if the group is broken. Errors name the collective."""
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
    """The work that `Collectives` returns. Waits are timed and observed, then callbacks run."""

    def __init__(self, work: Work, collectives: Collectives, name: str, number: int) -> None:
        super().__init__()
        self._work = work
        self._collectives = collectives
        self._name = name
        self._number = number

    def to_host(self, result: Tensor) -> Tensor:
        """Waits, and returns the result in host memory. On a GPU only this copy makes the host
        wait, so it is timed and observed with the wait. The observer can raise before the undefined
        result of an aborted collective is used."""

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


def run_on_all_ranks(collectives: Collectives, work: Callable[[], Any]) -> list[Any]:
    """Runs `work` on every rank and returns the results by rank. Collective.

    If `work` fails on one rank, this function raises on all ranks, so that none waits forever.

    Args:
        work: returns a JSON value. It must not call collectives.

    Raises:
        Exception: the one that `work` raised on this rank.
        EngineError: `work` failed on other ranks. It has the text of the first failure.
    """
    failure: Exception | None = None
    try:
        outcome = {"result": work()}
    except Exception as error:  # noqa: BLE001  raised below, once the other ranks know
        failure, outcome = error, {"error": str(error)}
    messages = _all_gather_bytes(collectives, json.dumps(outcome).encode())
    if failure is not None:
        raise failure
    outcomes = [json.loads(message) for message in messages]
    for rank, outcome in enumerate(outcomes):
        if "error" in outcome:
            raise EngineError(f"rank {rank} failed: {outcome['error']}")
    return [outcome["result"] for outcome in outcomes]


def _all_gather_bytes(collectives: Collectives, message: bytes) -> list[bytes]:
    """Returns every rank's message. Messages must not be empty. Collective."""
    if collectives.world_size == 1:
        return [message]
    lengths = [0.0] * collectives.world_size
    lengths[collectives.rank] = len(message)
    messages = []
    for rank, length in enumerate(collectives.sum_numbers(lengths)):
        own = message if rank == collectives.rank else bytes(int(length))
        buffer = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(collectives.device)
        result = collectives.start_broadcast(buffer, rank).to_host(buffer)
        messages.append(result.numpy().tobytes())
    return messages
