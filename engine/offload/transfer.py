"""Copies between a device and host memory, their streams, and when buffers may be reused.

| class | device | copies |
|---|---|---|
| NoTransfer | CPU: computes in host memory | none |
| CopyingTransfer | CPU, as if its memory were separate (tests, measurements) | synchronous |
| CudaTransfer | GPU | asynchronous, on side streams, from and to pinned memory |
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from rayzero.engine.comm.backend import (
    ChainableWork,
    CompletedWork,
    GatherOp,
    Work,
    copy_or_add_,
    rank_chunk,
)
from rayzero.engine.comm.collectives import Collectives


@dataclass(frozen=True)
class D2HCopy:
    """A device-to-host copy: `source` replaces `target`, or is added to it.

    Attributes:
        wait_on_side_stream: the copy follows a single collective, whose `wait` may be called at
            once and on the copy's stream, so that the GPU keeps computing. A compressed reduction
            runs kernels of its own and must be waited for first.
    """

    source: Tensor
    target: Tensor
    add: bool
    wait_on_side_stream: bool


class HostTransfer(Protocol):
    """Moves flat tensors between one device and host memory.

    Attributes:
        separate_memory: host memory is not the device's memory.
        staging_bytes: host memory of intermediate copies.
    """

    separate_memory: bool

    @property
    def staging_bytes(self) -> int: ...

    def host_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros in host memory."""

    def d2h(self, arrives: ChainableWork, copy: D2HCopy) -> Work:
        """Copies device to host as soon as `arrives` is complete.

        Only `wait_d2h` guarantees that the data is in host memory, not the returned work's `wait`.
        After its `release`, kernels that are enqueued may overwrite `source`.
        """

    def wait_d2h(self) -> None:
        """Returns when every copy whose work was waited for is in host memory."""

    def h2d(self, source: Tensor, target: Tensor) -> None:
        """Copies host to device, cast to the target's dtype. `source` may be overwritten only after
        `wait_h2d`; kernels enqueued after `sync_compute` see the target."""

    def wait_h2d(self) -> None:
        """Returns when the sources of all host-to-device copies may be overwritten."""

    def sync_compute(self) -> None:
        """Everything enqueued from now on sees all host-to-device copies."""

    def side_stream(self) -> AbstractContextManager[None]:
        """Copies and collectives launched inside overlap with computation, after what was enqueued
        so far. The collective's own `wait`, or `sync_compute`, waits for their results."""


class CopyingTransfer:
    """A CPU device, as if its memory were separate: every copy is synchronous."""

    separate_memory = True
    staging_bytes = 0

    def host_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def d2h(self, arrives: ChainableWork, copy: D2HCopy) -> Work:
        return arrives.then(lambda: copy_or_add_(copy.target, copy.source, add=copy.add))

    def wait_d2h(self) -> None:
        return

    def h2d(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def wait_h2d(self) -> None:
        return

    def sync_compute(self) -> None:
        return

    def side_stream(self) -> AbstractContextManager[None]:
        return nullcontext()


class NoTransfer(CopyingTransfer):
    """Host memory is the device's memory: gradients need no copy, and `h2d` only casts."""

    separate_memory = False


@dataclass
class _PendingD2H:
    """A copy to the host in flight; `staging` is added to `target` when it is complete."""

    done: torch.cuda.Event
    target: Tensor
    staging: Tensor | None


class CudaTransfer:
    """A GPU. One stream per direction, so that the two do not queue behind each other.

    Order. A copy starts after what was enqueued on the compute stream before it (`wait_stream`). A
    device-to-host copy also waits, on its own stream, for its collective, so computation continues.
    Readers on the host wait for the copy's event (`wait_d2h`, `wait_h2d`); before later kernels
    use a buffer, the compute stream waits for it (`release`, `sync_compute`). All tensors live as
    long as the engine, so `record_stream` is not needed.
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

    def d2h(self, arrives: ChainableWork, copy: D2HCopy) -> Work:
        if copy.wait_on_side_stream:
            return self._start_d2h(arrives, copy)
        done: list[_CopyWork] = []
        reduced = arrives.then(lambda: done.append(self._start_d2h(CompletedWork(), copy)))
        return _DeferredCopyWork(reduced, done)

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

    def _start_d2h(self, arrives: Work, copy: D2HCopy) -> _CopyWork:
        staging = self._acquire_staging(copy.source) if copy.add else None
        destination = copy.target if staging is None else staging[: copy.source.numel()]
        self._d2h_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._d2h_stream):
            arrives.wait()
            destination.copy_(copy.source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._d2h_stream)
        self._pending_d2h.append(_PendingD2H(done, copy.target, staging))
        return _CopyWork(done, self._device)

    def _wait_oldest_d2h(self) -> None:
        copy = self._pending_d2h.popleft()
        copy.done.synchronize()
        if copy.staging is not None:
            copy.target.add_(copy.staging[: copy.target.numel()])
            self._free_staging.append(copy.staging)

    def _acquire_staging(self, source: Tensor) -> Tensor:
        """Pinned memory as long as `source`; waits for an older copy before a third is made."""
        while sum(copy.staging is not None for copy in self._pending_d2h) >= 2:
            self._wait_oldest_d2h()
        for index, staging in enumerate(self._free_staging):
            if staging.dtype is source.dtype and staging.numel() >= source.numel():
                return self._free_staging.pop(index)
        staging = torch.empty(source.numel(), dtype=source.dtype, pin_memory=True)
        self.staging_bytes += staging.nbytes
        return staging


class _CopyWork:
    """A copy on a side stream."""

    def __init__(self, done: torch.cuda.Event, device: torch.device) -> None:
        self._done = done
        self._device = device

    def wait(self) -> None:
        return  # the host waits in `wait_d2h`; nothing on the device reads the copy

    def release(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)


class _DeferredCopyWork:
    """A reduction whose copy to the host starts when the host has waited for it."""

    def __init__(self, reduced: Work, copies: list[_CopyWork]) -> None:
        self._reduced = reduced
        self._copies = copies

    def wait(self) -> None:
        self._reduced.wait()

    def release(self) -> None:
        self._reduced.release()
        for copy in self._copies:
            copy.release()


def make_transfer(device: torch.device) -> HostTransfer:
    """The transfer between host memory and a device."""
    return CudaTransfer(device) if device.type == "cuda" else NoTransfer()


class MemoryKind(Enum):
    """Where a tensor is stored between steps."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class HostShardGather:
    """Gathers shards from host memory: copies them to the device, then all-gathers, both overlapped
    with computation.

    Order. The copy starts after everything enqueued on the compute stream, so kernels that read
    the buffer's previous block are done; and after `release` of the buffer's previous gather, so
    no other rank reads it.
    """

    def __init__(
        self, transfer: HostTransfer, collectives: Collectives, device: torch.device
    ) -> None:
        self.device = device
        self._transfer = transfer
        self._collectives = collectives
        self._last_gathers: dict[int, Work] = {}  # by the buffer's address

    def new_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._collectives.zeros(numel, dtype, self.device)

    def gather(self, full: Tensor, shard: Tensor, gathers: GatherOp) -> Work:
        previous = self._last_gathers.pop(full.data_ptr(), None)
        if previous is not None:
            previous.release()
        own = rank_chunk(full, gathers.rank, gathers.world_size)
        with self._transfer.side_stream():
            own.copy_(shard, non_blocking=True)
            gathered = _GatherAfterCopy(gathers.all_gather(full, own), self._transfer)
        self._last_gathers[full.data_ptr()] = gathered
        return gathered


class _GatherAfterCopy:
    """A gather of a part that was copied from the host."""

    def __init__(self, gathered: Work, transfer: HostTransfer) -> None:
        self._gathered = gathered
        self._transfer = transfer

    def wait(self) -> None:
        self._gathered.wait()
        self._transfer.sync_compute()

    def release(self) -> None:
        self._gathered.release()
