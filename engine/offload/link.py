"""The way between a device and host memory: copies, and what may be touched when.

| link | where | copies |
|---|---|---|
| SharedLink | the device computes in host memory (CPU) | none: both are the same memory |
| PlainLink | a CPU device, as if its memory were apart (tests, measurements) | at once |
| CudaLink | a GPU | asynchronous, on a stream of their own, from and to pinned memory |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rayzero.engine.comm.collectives import Done, Pending
from rayzero.engine.comm.put import put


@dataclass(frozen=True)
class Copy:
    """What a fetch does: `source` replaces `target`, or is added to it.

    Attributes:
        early: what it waits for is one collective, whose `wait` may be called at once, and on the
            copy's stream: a GPU then computes on. A sum of codes has kernels of its own.
    """

    source: Tensor
    target: Tensor
    add: bool
    early: bool


class Link(Protocol):
    """Moves flat tensors between one device and host memory.

    Attributes:
        apart: whether host memory is other memory than the device's.
        staging_bytes: host memory that copies pass through.
    """

    apart: bool

    @property
    def staging_bytes(self) -> int: ...

    def host(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros in host memory."""

    def fetch(self, arrives: Pending, copy: Copy) -> Pending:
        """Device to host, as soon as `arrives` has.

        The pending's `wait` does not say that it is in host memory: `land` does. After its
        `release`, kernels that are enqueued may overwrite `source`.
        """

    def land(self) -> None:
        """Returns when all that was fetched and waited for is in host memory."""

    def send(self, source: Tensor, target: Tensor) -> None:
        """Host to device, cast to the target's dtype. `source` may be overwritten only after
        `sent`; what is computed after `join` sees the target."""

    def sent(self) -> None:
        """Returns when the sources of all sends may be overwritten."""

    def join(self) -> None:
        """Everything enqueued from now on sees what was sent."""

    def ahead(self) -> AbstractContextManager[None]:
        """Copies and collectives launched inside run beside computation, after what was enqueued
        so far. Their results are waited for by the collective's own `wait`, or by `join`."""


class _Direct(AbstractContextManager[None]):
    """Nothing runs beside anything."""

    def __exit__(self, *_: object) -> None:
        return


class PlainLink:
    """A CPU device, as if its memory were apart: every copy is made, and made at once."""

    apart = True
    staging_bytes = 0

    def host(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def fetch(self, arrives: Pending, copy: Copy) -> Pending:
        return _Carried(arrives, lambda: _carry_out(copy))

    def land(self) -> None:
        return

    def send(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def sent(self) -> None:
        return

    def join(self) -> None:
        return

    def ahead(self) -> AbstractContextManager[None]:
        return _Direct()


class SharedLink(PlainLink):
    """Host memory is the device's memory. Nothing has to be fetched, and a send is a cast."""

    apart = False


class _Carried:
    """A pending whose copy is started once it has arrived."""

    def __init__(self, arrives: Pending, start: Callable[[], Pending]) -> None:
        self._arrives = arrives
        self._start = start
        self._copied: Pending | None = None

    def wait(self) -> None:
        self._arrives.wait()
        if self._copied is None:
            self._copied = self._start()

    def release(self) -> None:
        self.wait()
        self._arrives.release()
        if self._copied is not None:
            self._copied.release()


@dataclass
class _Landing:
    """A copy to the host under way; `staging` is to be added to `target` when it is there."""

    done: torch.cuda.Event
    target: Tensor
    staging: Tensor | None


class CudaLink:
    """A GPU. Two streams: one up, one down, so that sends do not queue behind fetches.

    Order. A copy starts after what was enqueued on the compute stream before it (`wait_stream`),
    and, for a fetch, after the collective that it waits for on its own stream, so computation goes
    on. Whoever reads on the host waits for the copy's event (`land`, `sent`); whoever computes
    next lets the compute stream wait for it (`release`, `join`). All tensors are the engine's own
    for its whole life, so the caching allocator has nothing to be told.
    """

    apart = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down = torch.cuda.Stream(device)
        self._up = torch.cuda.Stream(device)
        self._landing: deque[_Landing] = deque()
        self._staging: list[Tensor] = []  # pinned, not in use
        self.staging_bytes = 0

    def host(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, pin_memory=True)

    def fetch(self, arrives: Pending, copy: Copy) -> Pending:
        if copy.early:
            return self._start(arrives, copy)
        return _Carried(arrives, lambda: self._start(Done(), copy))

    def land(self) -> None:
        while self._landing:
            self._land_oldest()

    def send(self, source: Tensor, target: Tensor) -> None:
        self._up.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._up):
            target.copy_(source, non_blocking=True)

    def sent(self) -> None:
        self._up.synchronize()

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._up)

    def ahead(self) -> AbstractContextManager[None]:
        self._up.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._up)

    def _start(self, arrives: Pending, copy: Copy) -> Pending:
        staging = self._take_staging(copy.source) if copy.add else None
        landed = copy.target if staging is None else staging[: copy.source.numel()]
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            arrives.wait()
            landed.copy_(copy.source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._down)
        self._landing.append(_Landing(done, copy.target, staging))
        return _Copied(done, self._device)

    def _land_oldest(self) -> None:
        landing = self._landing.popleft()
        landing.done.synchronize()
        if landing.staging is not None:
            landing.target.add_(landing.staging[: landing.target.numel()])
            self._staging.append(landing.staging)

    def _take_staging(self, source: Tensor) -> Tensor:
        """Pinned memory as long as `source`; waits for an older copy before a third is made."""
        while len([one for one in self._landing if one.staging is not None]) >= 2:
            self._land_oldest()
        for index, one in enumerate(self._staging):
            if one.dtype is source.dtype and one.numel() >= source.numel():
                return self._staging.pop(index)
        made = torch.empty(source.numel(), dtype=source.dtype, pin_memory=True)
        self.staging_bytes += made.nbytes
        return made


class _Copied:
    """A copy on a stream of ours."""

    def __init__(self, done: torch.cuda.Event, device: torch.device) -> None:
        self._done = done
        self._device = device

    def wait(self) -> None:
        return  # the host waits in `land`, and nothing on the device reads what was fetched

    def release(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)


def _carry_out(copy: Copy) -> Pending:
    put(copy.target, copy.source, add=copy.add)
    return Done()


def link_for(device: torch.device) -> Link:
    """The link between host memory and a device."""
    return CudaLink(device) if device.type == "cuda" else SharedLink()
