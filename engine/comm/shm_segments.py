"""Anonymous shared memory that other ranks on the host can read: no file name can be left behind.

A segment is an anonymous file (memfd_create(2)); a peer opens it as /proc/<pid>/fd/<fd>, which
requires the same user and process namespace. It is freed when the last process unmaps it.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from rayzero.engine.errors import EngineError

SEGMENT_BYTES = 8 << 20  # small buffers share a segment, or descriptors would run out
ALIGN_BYTES = 128


class ShmSegments:
    """This rank's segments, and the peers' segments that it has mapped.

    Segments live as long as this object: they are the buffers of one engine.

    Attributes:
        pids: every rank's process id, by rank.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = pids
        self._locations: dict[int, tuple[int, int]] = {}  # (descriptor, offset) by address
        self._peer_maps: dict[tuple[int, int], mmap.mmap] = {}  # by rank and its descriptor
        self._segments: list[tuple[int, mmap.mmap]] = []  # the last one is being filled
        self._used_bytes = 0

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of zeros that peers can read. Raises EngineError if the system has not
        enough shared memory."""
        size = max(1, numel * dtype.itemsize)
        if not self._segments or self._used_bytes + size > len(self._segments[-1][1]):
            self._segments.append(_make_segment(max(size, SEGMENT_BYTES)))
            self._used_bytes = 0
        descriptor, memory = self._segments[-1]
        tensor = torch.frombuffer(memory, dtype=dtype, count=numel, offset=self._used_bytes)
        self._locations[tensor.untyped_storage().data_ptr()] = descriptor, self._used_bytes
        self._used_bytes += -(-size // ALIGN_BYTES) * ALIGN_BYTES
        return tensor

    def locate(self, tensor: Tensor) -> tuple[int, int] | None:
        """(file descriptor, offset in bytes) of a tensor of this rank; None if it is not shared."""
        location = self._locations.get(tensor.untyped_storage().data_ptr())
        if location is None:
            return None
        return location[0], location[1] + int(tensor.storage_offset()) * tensor.element_size()

    def view(self, rank: int, location: tuple[int, int], like: Tensor) -> Tensor:
        """Another rank's memory at a location, with the length and dtype of `like`. Raises
        RuntimeError, as a lost connection does, if that rank's process has ended."""
        descriptor, offset = location
        key = rank, descriptor
        if key not in self._peer_maps:
            try:
                self._peer_maps[key] = _map_segment(self.pids[rank], descriptor)
            except OSError as error:
                raise RuntimeError(
                    f"the shared memory of rank {rank} cannot be read: {error.strerror}"
                ) from error
        return torch.frombuffer(
            self._peer_maps[key], dtype=like.dtype, count=like.numel(), offset=offset
        )

    def close(self) -> None:
        """Closes the descriptors. The memory is freed when no tensor uses it any more."""
        for descriptor, _ in self._segments:
            os.close(descriptor)
        self._segments.clear()
        self._locations.clear()
        self._peer_maps.clear()

    def __del__(self) -> None:
        self.close()


def make_probe(secret: int) -> int:
    """The descriptor of a segment with a secret: a rank that can read it shares memory."""
    descriptor = os.memfd_create("rayzero-probe")
    os.write(descriptor, secret.to_bytes(8, sys.byteorder))
    return descriptor


def is_readable(pid: int, descriptor: int, secret: int) -> bool:
    """Whether this rank can read another rank's probe."""
    try:
        with _map_segment(pid, descriptor) as memory:
            return int.from_bytes(memory[:8], sys.byteorder) == secret
    except (OSError, ValueError):
        return False


def _make_segment(size: int) -> tuple[int, mmap.mmap]:
    descriptor = os.memfd_create("rayzero")
    try:
        os.posix_fallocate(descriptor, 0, size)  # fails here instead of by SIGBUS at first access
        return descriptor, mmap.mmap(descriptor, size)
    except OSError as error:
        os.close(descriptor)
        raise EngineError(
            f"{size} bytes of shared memory could not be allocated: {error.strerror}",
            fix="the memory limit of this machine or container, or RAYZERO_SHARED_MEMORY=0 to "
            "exchange over TCP",
        ) from None


def _map_segment(pid: int, descriptor: int) -> mmap.mmap:
    # Writable only because torch warns about tensors over read-only memory.
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(opened, 0)
    finally:
        os.close(opened)
