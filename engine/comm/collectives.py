"""Collectives: counts, numbers, times (other half) + all_gather_bytes, run_on_all_ranks.

The collectives the engine uses, one interface over NCCL, gloo, and no process group at all.

`Collectives` counts calls and bytes and numbers them; a backend moves the data. Bytes are counted
as the ZeRO paper does: a reduce-scatter or an all-gather moves the whole buffer once, an
all-reduce twice.

Small messages between ranks, and work that either succeeds on all of them or fails on all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from rayzero.engine.comm.backend import Backend, CompletedWork, Work
from rayzero.engine.errors import CollectiveError, EngineError

T = TypeVar("T")


@dataclass
class CollectiveStats:
    """What one kind of collective has moved so far."""

    calls: int = 0
    bytes: int = 0


@dataclass
class CommCounters:
    """Calls and bytes by collective, and the seconds the training thread stood waiting."""

    by_name: dict[str, CollectiveStats] = field(default_factory=dict)
    sequence: int = 0
    exposed_s: float = 0.0

    def count(self, name: str, moved_bytes: int) -> None:
        traffic = self.by_name.setdefault(name, CollectiveStats())
        traffic.calls += 1
        traffic.bytes += moved_bytes
        self.sequence += 1


class Collectives:
    """The engine's only way to other ranks.

    Attributes:
        watch: told (number, entered=) when a wait for other ranks begins and ends. What it raises
            breaks the collective off.
    """

    single_collective = True

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.counters = CommCounters()
        self.wait_observer: Callable[[int, bool], None] = _no_observer

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

    def progress_pending(self) -> None:
        """Called before the user's code goes on, which may hold collectives of its own.

        Without it a peer could wait here for what this rank would only do later.
        """
        if self.world_size > 1:
            self.run_timed("an exchange", self.counters.sequence, self._backend.progress_pending)

    def all_reduce(self, full: Tensor) -> Work:
        return self._launch("all_reduce", 2 * full.nbytes, lambda: self._backend.all_reduce(full))

    def reduce_scatter(self, full: Tensor, out: Tensor, *, accumulate: bool = False) -> Work:
        return self._launch(
            "reduce_scatter",
            full.nbytes,
            lambda: self._backend.reduce_scatter(full, out, accumulate=accumulate),
        )

    def all_gather(self, full: Tensor, part: Tensor) -> Work:
        return self._launch("all_gather", full.nbytes, lambda: self._backend.all_gather(full, part))

    def all_gather_in_group(self, full: Tensor, part: Tensor, members: range) -> Work:
        return self._launch(
            "all_gather_in_group",
            full.nbytes,
            lambda: self._backend.all_gather_in_group(full, part, members),
        )

    def all_to_all(self, full: Tensor, received: Tensor) -> Work:
        moved = full.nbytes
        return self._launch("all_to_all", moved, lambda: self._backend.all_to_all(full, received))

    def gather(self, full: Tensor, part: Tensor, target: int = 0) -> Work:
        moved = part.nbytes * self.world_size
        return self._launch("gather", moved, lambda: self._backend.gather(full, part, target))

    def all_to_all_v(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Work:
        moved = sum(one.nbytes for one in sent)
        return self._launch("exchange", moved, lambda: self._backend.all_to_all_v(received, sent))

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        def run() -> Work:
            self._backend.broadcast(tensor, source)
            return CompletedWork()

        self._launch("broadcast", tensor.nbytes, run)

    def all_reduce_scalars(self, scalars: Tensor) -> None:
        """Sums a few numbers over the ranks, in place, and waits for them."""
        self._launch("vote", scalars.nbytes, lambda: self._backend.all_reduce(scalars)).wait()

    def all_reduce_now(self, values: Tensor) -> None:
        """Sums a short vector over the ranks, in place, and waits for it."""
        self._launch("sums", values.nbytes, lambda: self._backend.all_reduce(values)).wait()

    def _launch(self, name: str, moved_bytes: int, run: Callable[[], Work]) -> Work:
        self.counters.count(name, moved_bytes)
        if self.world_size == 1:
            return run()
        number = self.counters.sequence
        return _TimedWork(name, number, self.run_timed(name, number, run), self)

    def run_timed(self, name: str, number: int, waits: Callable[[], T]) -> T:
        """Runs something that may wait for other ranks; a failure says what was going on."""
        start = perf_counter()
        self.wait_observer(number, True)
        try:
            result = waits()
        except RuntimeError as error:
            raise CollectiveError(
                f"{name} failed on rank {self.rank} of {self.world_size} (collective {number}): "
                f"{error}"
            ) from error
        self.wait_observer(number, False)
        self.counters.exposed_s += perf_counter() - start
        return result


class _TimedWork:
    """A pending collective whose waits are counted and watched."""

    def __init__(self, name: str, number: int, pending: Work, owner: Collectives) -> None:
        self._name = name
        self._number = number
        self._work = pending
        self._owner = owner

    def wait(self) -> None:
        self._owner.run_timed(self._name, self._number, self._work.wait)

    def release(self) -> None:
        self._owner.run_timed(self._name, self._number, self._work.release)


def _no_observer(number: int, entered: bool) -> None:
    """There is nobody to tell of waits."""


def all_gather_bytes(collectives: Collectives, message: bytes, device: torch.device) -> list[bytes]:
    """Each rank's message, on every rank. Collective.

    Args:
        device: where the group's backend can read from.
    """
    ranks = range(collectives.world_size)
    if len(ranks) == 1:
        return [message]
    lengths = torch.zeros(len(ranks), dtype=torch.float64, device=device)
    lengths[collectives.rank] = len(message)
    collectives.all_reduce_scalars(lengths)
    found = []
    for rank, length in zip(ranks, lengths.tolist(), strict=True):
        buffer = torch.zeros(int(length), dtype=torch.uint8)
        if rank == collectives.rank and message:
            buffer.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        buffer = buffer.to(device)
        if length:
            collectives.broadcast(buffer, rank)
        found.append(buffer.cpu().numpy().tobytes())
    return found


def run_on_all_ranks(
    collectives: Collectives, device: torch.device, work: Callable[[], Any]
) -> list[Any]:
    """Runs `work` on every rank; what each returned, by rank. Collective.

    If it fails on one rank it fails on all of them, so that none waits for another in vain.

    Args:
        work: returns what JSON can hold. No collectives in it.

    Raises:
        Whatever `work` raised here; EngineError with the first failure's text elsewhere.
    """
    failure: Exception | None = None
    result = None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001  raised below, after the others have heard of it
        failure = error
    told = {"result": result} if failure is None else {"error": str(failure)}
    answers = [
        json.loads(one) for one in all_gather_bytes(collectives, json.dumps(told).encode(), device)
    ]
    if failure is not None:
        raise failure
    for rank, answer in enumerate(answers):
        if "error" in answer:
            raise EngineError(f"rank {rank} failed: {answer['error']}")
    return [answer["result"] for answer in answers]
