"""Temporary buffers, and host memory whose pages are allocated when they are first written."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor


def map_zeros(size: int) -> Tensor:
    """Returns `size` zero bytes of host memory. A page is allocated when it is first written, and
    all are returned to the system with the last tensor that uses them.

    malloc does not guarantee that. Once glibc has freed blocks of some MB, it takes such blocks
    from the heap. Freed heap memory stays in the process: up to 64 MB, and all below a live block.
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
        """Returns a flat tensor with undefined values. Invalidates the previously returned one."""
        size, device = numel * dtype.itemsize, self._memory.device
        if self._memory.numel() < size:
            self._memory = torch.empty(0, dtype=torch.uint8, device=device)
            on_host = device.type == "cpu"
            self._memory = map_zeros(size) if on_host else self._memory.new_empty(size)
        return self._memory[:size].view(dtype)
