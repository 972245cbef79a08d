"""Copies between a device and host memory: their streams, and when their buffers may be reused.

Rules of ordering: `d2h-after-reduce`, `host-gather` (docs/engine.md).
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from rayzero.engine.comm.backend import ChainableWork, GatherOp, Work, copy_or_add_, rank_chunk
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.device import Device, Event, get_device

CAST_NUMEL = 1 << 24  # elements that are cast at once on their way to the device


class MemoryKind(Enum):
    """The memory in which a tensor is stored between steps."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class HostTransfer:
    """Moves flat tensors between one device and host memory. In this class the device is a CPU and
    every copy is synchronous; `StreamTransfer` is for GPUs.

    Attributes:
        separate_memory: whether the device has memory of its own. False on a CPU, except in tests
            and measurements. If false, gradients need no copy, and `h2d` only casts.
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
        """Copies from device to host as soon as `arrives` is complete: `source` replaces `target`,
        or is added to it (`add`).

        Only `wait_d2h` guarantees that the data is in host memory; the returned work's `wait` does
        not. Kernels that are enqueued after the work's `release` may overwrite `source`.

        `early` means that `arrives` is a single collective. Its `wait` may then be called at once
        and on the copy's stream, so that the GPU keeps computing. A compressed reduction, which
        runs kernels of its own, must be waited for before the copy.
        """
        return arrives.then(lambda: copy_or_add_(target, source, add=add))

    def wait_d2h(self) -> None:
        """Returns when every copy whose work was waited for is in host memory."""

    def h2d(self, source: Tensor, target: Tensor) -> Event:
        """Copies from host to device, cast to the target's dtype. `source` may be overwritten only
        after the returned event, or after `wait_h2d`. Kernels that are enqueued after
        `sync_compute` see the new values of `target`."""
        target.copy_(source)
        return Event()

    def wait_h2d(self) -> None:
        """Returns when the sources of all host-to-device copies may be overwritten."""

    def sync_compute(self) -> None:
        """Makes everything that is enqueued from now on run after all host-to-device copies."""

    def side_stream(self) -> AbstractContextManager[None]:
        """Returns a context: copies and collectives launched in it overlap with later computation.
        They run after everything that was enqueued before. A collective's `wait`, or
        `sync_compute`, waits for their results."""
        return nullcontext()


@dataclass
class _D2HCopy(Work):
    """A copy to the host. No kernel reads the copy, so `wait` waits only for the reduction.

    Attributes:
        device: device of `source`.
        staging: the copy's destination, which is added to `target` when the copy is complete; None
            if `target` is the destination.
        done: event behind the copy; None before the copy has started.
        reduced: the reduction, if the host must wait for it before the copy starts.
    """

    device: Device
    source: Tensor
    target: Tensor
    add: bool
    staging: Tensor | None = None
    done: Event | None = None
    reduced: Work = field(default_factory=Work)

    def wait(self) -> None:
        self.reduced.wait()

    def release(self) -> None:
        self.reduced.release()
        if self.done is not None:
            self.device.current_stream().wait_event(self.done)


class StreamTransfer(HostTransfer):
    """Transfer of a device with streams, such as a GPU, and pinned host memory. Each direction has
    a stream, so that copies of one direction do not queue behind those of the other.

    Order. A copy starts after what was enqueued on the compute stream before it (`wait_stream`). A
    device-to-host copy also waits for its collective, on the copy's stream, so that computation
    continues. Readers on the host wait for the copy's event (`wait_d2h`, `wait_h2d`). Before later
    kernels use a buffer, the compute stream waits for the copy (`release`, `sync_compute`). All
    tensors live as long as the engine, so `record_stream` is not needed.

    A host-to-device copy to another dtype is cast on the CPU, in parts, into two pinned buffers
    in turn. A cast on the device would transfer and allocate the bytes of the wider dtype. A buffer
    is written again only after the event behind its copy.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(separate_memory=True)
        self._device = device
        self._d2h_stream = device.new_stream()
        self._h2d_stream = device.new_stream()
        self._pending_d2h: deque[_D2HCopy] = deque()  # oldest first
        self._free_staging: list[Tensor] = []  # pinned, not in use
        self._casts: deque[tuple[Tensor, Event]] = deque()  # buffers and their copies, oldest first

    def host_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._device.host_empty(numel, dtype).zero_()

    def d2h(
        self, arrives: ChainableWork, source: Tensor, target: Tensor, *, add: bool, early: bool
    ) -> Work:
        copy = _D2HCopy(self._device, source, target, add)
        if early:
            self._start_d2h(copy, arrives)
        else:
            copy.reduced = arrives.then(lambda: self._start_d2h(copy, Work()))
        return copy

    def wait_d2h(self) -> None:
        while self._pending_d2h:
            self._wait_oldest_d2h()

    def h2d(self, source: Tensor, target: Tensor) -> Event:
        with self.side_stream():
            if source.dtype is target.dtype:
                target.copy_(source, non_blocking=True)
                return self._device.record_event()
            parts = zip(source.split(CAST_NUMEL), target.split(CAST_NUMEL), strict=True)
            for wide, part in parts:
                buffer = self._cast_buffer(min(source.numel(), CAST_NUMEL), target.dtype)
                part.copy_(buffer[: wide.numel()].copy_(wide), non_blocking=True)
                self._casts.append((buffer, self._device.record_event()))
        return Event()  # the CPU has read the source

    def wait_h2d(self) -> None:
        self._h2d_stream.synchronize()

    def sync_compute(self) -> None:
        self._device.current_stream().wait_stream(self._h2d_stream)

    def side_stream(self) -> AbstractContextManager[None]:
        self._h2d_stream.wait_stream(self._device.current_stream())
        return self._device.use_stream(self._h2d_stream)

    def _cast_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns one of two pinned buffers, once the previous copy from it has completed."""
        if len(self._casts) == 2:
            buffer, copied = self._casts.popleft()
            copied.synchronize()
            if buffer.dtype is dtype and buffer.numel() >= numel:
                return buffer
            self.staging_bytes -= buffer.nbytes
        buffer = self._device.host_empty(numel, dtype)
        self.staging_bytes += buffer.nbytes
        return buffer

    def _start_d2h(self, copy: _D2HCopy, arrives: Work) -> None:
        destination = copy.target
        if copy.add:
            copy.staging = self._acquire_staging(copy.source)
            destination = copy.staging[: copy.source.numel()]
        self._d2h_stream.wait_stream(self._device.current_stream())
        with self._device.use_stream(self._d2h_stream):
            arrives.wait()
            destination.copy_(copy.source, non_blocking=True)
            copy.done = self._device.record_event()
        self._pending_d2h.append(copy)

    def _wait_oldest_d2h(self) -> None:
        copy = self._pending_d2h.popleft()
        if copy.done is not None:
            copy.done.synchronize()
        if copy.staging is not None:
            copy.target.add_(copy.staging[: copy.target.numel()])
            self._free_staging.append(copy.staging)

    def _acquire_staging(self, source: Tensor) -> Tensor:
        """Returns pinned memory of at least the size of `source`. At most two such buffers are in
        use: waits for an older copy if there are two."""
        while sum(copy.staging is not None for copy in self._pending_d2h) >= 2:
            self._wait_oldest_d2h()
        for index, staging in enumerate(self._free_staging):
            if staging.dtype is source.dtype and staging.numel() >= source.numel():
                return self._free_staging.pop(index)
        staging = self._device.host_empty(source.numel(), source.dtype)
        self.staging_bytes += staging.nbytes
        return staging


def make_transfer(device: torch.device) -> HostTransfer:
    """Returns the transfer between host memory and a device."""
    target = get_device(device)
    if target.asynchronous:
        return StreamTransfer(target)
    return HostTransfer(separate_memory=target.separate_memory)


class HostShardGather:
    """Gathers shards from host memory: copies them to the device, then all-gathers, both overlapped
    with computation.

    Order. The copy starts after everything enqueued on the compute stream, so kernels that read the
    buffer's previous weights are done; and after `release` of the buffer's previous gather, so no
    other rank reads the buffer. A mapped file (`memory_kind` DISK) is not page-locked, so the host
    waits in the copy until the bytes have been read from the file.
    """

    def __init__(
        self,
        transfer: HostTransfer,
        collectives: Collectives,
        memory_kind: MemoryKind = MemoryKind.HOST,
    ) -> None:
        self.memory_kind = memory_kind
        self.device = collectives.device
        self._transfer = transfer
        self._collectives = collectives
        self._last_gathers: dict[int, Work] = {}  # by the buffer's address

    def new_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._collectives.zeros(numel, dtype)

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
