"""Reading a state into the memory of an asynchronous device.

Order. The copies run on a stream of their own, after what was enqueued before. Bytes in host memory
that is registered with the device are copied from there, and their checksums are verified by the
host meanwhile; all others are verified as they are read, into two pinned buffers in turn, each of
which is filled again when its copy is done. Nothing is believed before the end: it waits for the
copies, and raises if a checksum is wrong; only then may the source be closed. What is enqueued on
the current stream after that sees the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rayzero.engine.device import Device, Event, Stream
from rayzero.engine.layout.state_index import StateSource

STAGING_BYTES = 64 * 2**20

Read = tuple[int, int, Tensor, torch.dtype]
"""Block, offset in it, flat target, dtype in the block."""


@runtime_checkable
class RegisteredSource(Protocol):
    """A state source some of whose blocks may be in registered host memory."""

    def registered_block(self, block: int) -> memoryview | None:
        """Its bytes, not verified; None if it is not in such memory."""

    def verify(self, block: int) -> None:
        """Raises DataError if the block's bytes are damaged."""


@runtime_checkable
class TensorHolder(Protocol):
    """A state source some of whose blocks are tensors."""

    def tensor(self, block: int, offset: int, nbytes: int) -> Tensor | None:
        """Those bytes as a view; None if the block is to be read. Called once for each read."""


def read_to_device(device: Device, source: StateSource, reads: Sequence[Read]) -> None:
    """Fill targets on the device. Raises as `StateSource.read`."""
    stream = device.new_stream()
    stream.wait_stream(device.current_stream())
    staging: list[tuple[Tensor, Event]] = []
    registered: dict[int, memoryview] = {}
    if isinstance(source, RegisteredSource):
        for block in {read[0] for read in reads}:
            if (data := source.registered_block(block)) is not None:
                registered[block] = data
    try:
        # The registered ones first: they run while the host reads the others, and verifies.
        for block, offset, target, dtype in sorted(reads, key=lambda it: it[0] not in registered):
            if (data := registered.get(block)) is None:
                _read_staged(device, stream, source, (block, offset, target, dtype), staging)
                continue
            host = torch.frombuffer(data, dtype=dtype, count=target.numel(), offset=offset)
            with device.use_stream(stream):
                target.copy_(host, non_blocking=True)
        if isinstance(source, RegisteredSource):
            for block in registered:
                source.verify(block)
    finally:
        stream.synchronize()


def _read_staged(
    device: Device,
    stream: Stream,
    source: StateSource,
    read: Read,
    staging: list[tuple[Tensor, Event]],
) -> None:
    """`staging`: two pinned buffers, the next one first, with the events of their copies."""
    block, offset, target, dtype = read
    step = STAGING_BYTES // dtype.itemsize
    for start in range(0, target.numel(), step):
        part = target[start : start + step]
        if len(staging) < 2:
            buffer = device.host_empty(STAGING_BYTES, torch.uint8)
        else:
            buffer, copied = staging.pop(0)
            copied.synchronize()
        host = buffer[: part.numel() * dtype.itemsize]
        source.read(block, offset + start * dtype.itemsize, host.numpy().data)
        with device.use_stream(stream):
            part.copy_(host.view(dtype), non_blocking=True)
            staging.append((buffer, device.record_event()))
