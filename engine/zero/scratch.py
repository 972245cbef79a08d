"""Memory for a while, and memory that is not there until it is written."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor


def map_zeros(size: int) -> Tensor:
    """Bytes of host memory, zero, which take no room before they are written, and none after the
    last tensor of them is gone.

    Not from malloc: once glibc has freed blocks of some MB, it takes such blocks from the heap, and
    leaves up to 64 MB of that, and all that lies below a small block, in the process.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)


class ScratchBuffer:
    """Reused memory for one tensor at a time: repeated large allocations fragment the heap."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def flat(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor, of any values. It invalidates the previous one."""
        size, device = numel * dtype.itemsize, self._memory.device
        if self._memory.numel() < size:
            self._memory = torch.empty(0, dtype=torch.uint8, device=device)
            on_host = device.type == "cpu"
            self._memory = map_zeros(size) if on_host else self._memory.new_empty(size)
        return self._memory[:size].view(dtype)
