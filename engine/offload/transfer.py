"""Device <-> host copies and their streams; MemoryKind.

The way between a device and host memory: copies, and what may be touched when.

| link | where | copies |
|---|---|---|
| NoTransfer | the device computes in host memory (CPU) | none: both are the same memory |
| CopyingTransfer | a CPU device, as if its memory were apart (tests, measurements) | at once |
| CudaTransfer | a GPU | asynchronous, on a stream of their own, from and to pinned memory |

Kinds of memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from rayzero.engine.comm.backend import CompletedWork, GatherOp, Work, copy_or_add_, rank_chunk
from rayzero.engine.comm.collectives import Collectives


@dataclass(frozen=True)
class D2HCopy:
    """What a fetch does: `source` replaces `target`, or is added to it.

    Attributes:
        early: what it waits for is one collective, whose `wait` may be called at once, and on the
            copy's stream: a GPU then computes on. A sum of codes has kernels of its own.
    """

    source: Tensor
    target: Tensor
    add: bool
    wait_on_side_stream: bool


class HostTransfer(Protocol):
    """Moves flat tensors between one device and host memory.

    Attributes:
        apart: whether host memory is other memory than the device's.
        staging_bytes: host memory that copies pass through.
    """

    separate_memory: bool

    @property
    def staging_bytes(self) -> int: ...

    def host_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros in host memory."""

    def d2h(self, arrives: Work, copy: D2HCopy) -> Work:
        """Device to host, as soon as `arrives` has.

        The pending's `wait` does not say that it is in host memory: `land` does. After its
        `release`, kernels that are enqueued may overwrite `source`.
        """

    def wait_d2h(self) -> None:
        """Returns when all that was fetched and waited for is in host memory."""

    def h2d(self, source: Tensor, target: Tensor) -> None:
        """Host to device, cast to the target's dtype. `source` may be overwritten only after
        `sent`; what is computed after `join` sees the target."""

    def wait_h2d(self) -> None:
        """Returns when the sources of all sends may be overwritten."""

    def sync_compute(self) -> None:
        """Everything enqueued from now on sees what was sent."""

    def side_stream(self) -> AbstractContextManager[None]:
        """Copies and collectives launched inside run beside computation, after what was enqueued
        so far. Their results are waited for by the collective's own `wait`, or by `join`."""


class _SameStream(AbstractContextManager[None]):
    """Nothing runs beside anything."""

    def __exit__(self, *_: object) -> None:
        return


class CopyingTransfer:
    """A CPU device, as if its memory were apart: every copy is made, and made at once."""

    separate_memory = True
    staging_bytes = 0

    def host_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def d2h(self, arrives: Work, copy: D2HCopy) -> Work:
        return _DeferredCopy(arrives, lambda: _copy_now(copy))

    def wait_d2h(self) -> None:
        return

    def h2d(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def wait_h2d(self) -> None:
        return

    def sync_compute(self) -> None:
        return

    def side_stream(self) -> AbstractContextManager[None]:
        return _SameStream()


class NoTransfer(CopyingTransfer):
    """Host memory is the device's memory. Nothing has to be fetched, and a send is a cast."""

    separate_memory = False


class _DeferredCopy:
    """A pending whose copy is started once it has arrived."""

    def __init__(self, arrives: Work, start: Callable[[], Work]) -> None:
        self._work = arrives
        self._start_copy = start
        self._copied: Work | None = None

    def wait(self) -> None:
        self._work.wait()
        if self._copied is None:
            self._copied = self._start_copy()

    def release(self) -> None:
        self.wait()
        self._work.release()
        if self._copied is not None:
            self._copied.release()


@dataclass
class _PendingD2H:
    """A copy to the host under way; `staging` is to be added to `target` when it is there."""

    done: torch.cuda.Event
    target: Tensor
    staging: Tensor | None


class CudaTransfer:
    """A GPU. Two streams: one up, one down, so that sends do not queue behind fetches.

    Order. A copy starts after what was enqueued on the compute stream before it (`wait_stream`),
    and, for a fetch, after the collective that it waits for on its own stream, so computation goes
    on. Whoever reads on the host waits for the copy's event (`land`, `sent`); whoever computes
    next lets the compute stream wait for it (`release`, `join`). All tensors are the engine's own
    for its whole life, so the caching allocator has nothing to be told.
    """

    separate_memory = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._d2h_stream = torch.cuda.Stream(device)
        self._h2d_stream = torch.cuda.Stream(device)
        self._pending_d2h: deque[_PendingD2H] = deque()
        self._free_staging: list[Tensor] = []  # pinned, not in use
        self.staging_bytes = 0

    def host_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, pin_memory=True)

    def d2h(self, arrives: Work, copy: D2HCopy) -> Work:
        if copy.wait_on_side_stream:
            return self._start_d2h(arrives, copy)
        return _DeferredCopy(arrives, lambda: self._start_d2h(CompletedWork(), copy))

    def wait_d2h(self) -> None:
        while self._pending_d2h:
            self._wait_oldest_d2h()

    def h2d(self, source: Tensor, target: Tensor) -> None:
        self._h2d_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._h2d_stream):
            target.copy_(source, non_blocking=True)

    def wait_h2d(self) -> None:
        self._h2d_stream.synchronize()

    def sync_compute(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._h2d_stream)

    def side_stream(self) -> AbstractContextManager[None]:
        self._h2d_stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._h2d_stream)

    def _start_d2h(self, arrives: Work, copy: D2HCopy) -> Work:
        staging = self._acquire_staging(copy.source) if copy.add else None
        landed = copy.target if staging is None else staging[: copy.source.numel()]
        self._d2h_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._d2h_stream):
            arrives.wait()
            landed.copy_(copy.source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._d2h_stream)
        self._pending_d2h.append(_PendingD2H(done, copy.target, staging))
        return _CopyWork(done, self._device)

    def _wait_oldest_d2h(self) -> None:
        landing = self._pending_d2h.popleft()
        landing.done.synchronize()
        if landing.staging is not None:
            landing.target.add_(landing.staging[: landing.target.numel()])
            self._free_staging.append(landing.staging)

    def _acquire_staging(self, source: Tensor) -> Tensor:
        """Pinned memory as long as `source`; waits for an older copy before a third is made."""
        while len([one for one in self._pending_d2h if one.staging is not None]) >= 2:
            self._wait_oldest_d2h()
        for index, one in enumerate(self._free_staging):
            if one.dtype is source.dtype and one.numel() >= source.numel():
                return self._free_staging.pop(index)
        made = torch.empty(source.numel(), dtype=source.dtype, pin_memory=True)
        self.staging_bytes += made.nbytes
        return made


class _CopyWork:
    """A copy on a stream of ours."""

    def __init__(self, done: torch.cuda.Event, device: torch.device) -> None:
        self._done = done
        self._device = device

    def wait(self) -> None:
        return  # the host waits in `land`, and nothing on the device reads what was fetched

    def release(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)


def _copy_now(copy: D2HCopy) -> Work:
    copy_or_add_(copy.target, copy.source, add=copy.add)
    return CompletedWork()


def make_transfer(device: torch.device) -> HostTransfer:
    """The link between host memory and a device."""
    return CudaTransfer(device) if device.type == "cuda" else NoTransfer()


class MemoryKind(Enum):
    """Where a tensor rests."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class HostShardGather:
    """How shards come from host memory into slots: over the link, then from rank to rank, both
    beside the computation.

    Order. The copy starts after all that was enqueued on the compute stream, so kernels that read
    the slot's last occupant are done; and after `release` of the gather that was made from the slot
    before, so no other rank reads it.
    """

    def __init__(self, link: HostTransfer, collectives: Collectives, device: torch.device) -> None:
        self.device = device
        self._transfer = link
        self._collectives = collectives
        self._last_gathers: dict[int, Work] = {}  # gather from each slot, by its address

    def new_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._collectives.zeros(numel, dtype, self.device)

    def gather(self, full: Tensor, shard: Tensor, gathers: GatherOp) -> Work:
        before = self._last_gathers.pop(full.data_ptr(), None)
        if before is not None:
            before.release()
        own = rank_chunk(full, gathers.rank, gathers.world_size)
        with self._transfer.side_stream():
            own.copy_(shard, non_blocking=True)
            gathered = _GatherAfterCopy(gathers.all_gather(full, own), self._transfer)
        self._last_gathers[full.data_ptr()] = gathered
        return gathered


class _GatherAfterCopy:
    """A gather whose own part came over a link."""

    def __init__(self, gathered: Work, link: HostTransfer) -> None:
        self._gathered = gathered
        self._transfer = link

    def wait(self) -> None:
        self._gathered.wait()
        self._transfer.sync_compute()

    def release(self) -> None:
        self._gathered.release()
