"""Copies between a device and host memory, their streams, and when buffers may be reused."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum

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


class MemoryKind(Enum):
    """Where a tensor is stored between steps."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class HostTransfer:
    """Moves flat tensors between one device and host memory. In this class the device is a CPU and
    every copy is synchronous; `CudaTransfer` is for GPUs.

    Attributes:
        separate_memory: host memory is not the device's memory. On a CPU it is, except in tests and
            measurements: then gradients need no copy, and `h2d` only casts.
        staging_bytes: host memory of intermediate copies.
    """

    def __init__(self, *, separate_memory: bool) -> None:
        self.separate_memory = separate_memory
        self.staging_bytes = 0

    def host_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def d2h(
        self, arrives: ChainableWork, source: Tensor, target: Tensor, *, add: bool, early: bool
    ) -> Work:
        """Copies device to host as soon as `arrives` is complete: `source` replaces `target`, or is
        added to it.

        Only `wait_d2h` guarantees that the data is in host memory, not the returned work's `wait`.
        After its `release`, kernels that are enqueued may overwrite `source`.

        `early`: `arrives` is a single collective, whose `wait` may be called at once and on the
        copy's stream, so that the GPU keeps computing. A compressed reduction runs kernels of its
        own and must be waited for first.
        """
        return arrives.then(lambda: copy_or_add_(target, source, add=add))

    def wait_d2h(self) -> None:
        """Returns when every copy whose work was waited for is in host memory."""

    def h2d(self, source: Tensor, target: Tensor) -> None:
        """Copies host to device, cast to the target's dtype. `source` may be overwritten only after
        `wait_h2d`; kernels enqueued after `sync_compute` see the target."""
        target.copy_(source)

    def wait_h2d(self) -> None:
        """Returns when the sources of all host-to-device copies may be overwritten."""

    def sync_compute(self) -> None:
        """Everything enqueued from now on sees all host-to-device copies."""

    def side_stream(self) -> AbstractContextManager[None]:
        """Copies and collectives launched inside overlap with computation, after what was enqueued
        so far. The collective's own `wait`, or `sync_compute`, waits for their results."""
        return nullcontext()


@dataclass
class _D2HCopy:
    """A copy to the host. Nothing on the device reads it, so `wait` is that of the reduction.

    Attributes:
        staging: added to `target` when the copy is complete; None if it goes there directly.
        done: recorded behind the copy; None before it has started.
        reduced: what the host must wait for before the copy starts.
    """

    source: Tensor
    target: Tensor
    add: bool
    staging: Tensor | None = None
    done: torch.cuda.Event | None = None
    reduced: Work = field(default_factory=CompletedWork)

    def wait(self) -> None:
        self.reduced.wait()

    def release(self) -> None:
        self.reduced.release()
        if self.done is not None:
            torch.cuda.current_stream(self.source.device).wait_event(self.done)


class CudaTransfer(HostTransfer):
    """A GPU, with pinned host memory. One stream per direction, so that the two do not queue behind
    each other.

    Order. A copy starts after what was enqueued on the compute stream before it (`wait_stream`). A
    device-to-host copy also waits, on its own stream, for its collective, so computation continues.
    Readers on the host wait for the copy's event (`wait_d2h`, `wait_h2d`); before later kernels
    use a buffer, the compute stream waits for it (`release`, `sync_compute`). All tensors live as
    long as the engine, so `record_stream` is not needed.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(separate_memory=True)
        self._device = device
        self._d2h_stream = torch.cuda.Stream(device)
        self._h2d_stream = torch.cuda.Stream(device)
        self._pending_d2h: deque[_D2HCopy] = deque()  # oldest first
        self._free_staging: list[Tensor] = []  # pinned, not in use

    def host_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, pin_memory=True)

    def d2h(
        self, arrives: ChainableWork, source: Tensor, target: Tensor, *, add: bool, early: bool
    ) -> Work:
        copy = _D2HCopy(source, target, add)
        if early:
            self._start_d2h(copy, arrives)
        else:
            copy.reduced = arrives.then(lambda: self._start_d2h(copy, CompletedWork()))
        return copy

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

    def _start_d2h(self, copy: _D2HCopy, arrives: Work) -> None:
        destination = copy.target
        if copy.add:
            copy.staging = self._acquire_staging(copy.source)
            destination = copy.staging[: copy.source.numel()]
        self._d2h_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._d2h_stream):
            arrives.wait()
            destination.copy_(copy.source, non_blocking=True)
            copy.done = torch.cuda.Event()
            copy.done.record(self._d2h_stream)
        self._pending_d2h.append(copy)

    def _wait_oldest_d2h(self) -> None:
        copy = self._pending_d2h.popleft()
        if copy.done is not None:
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


def make_transfer(device: torch.device) -> HostTransfer:
    """The transfer between host memory and a device; the meta device counts as separate memory."""
    if device.type == "cuda":
        return CudaTransfer(device)
    return HostTransfer(separate_memory=device.type == "meta")


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
        own = rank_chunk(full, self._collectives.rank, self._collectives.world_size)
        with self._transfer.side_stream():
            own.copy_(shard, non_blocking=True)
            gathered = gathers.all_gather(full, own).then(self._transfer.sync_compute)
        self._last_gathers[full.data_ptr()] = gathered
        return gathered
