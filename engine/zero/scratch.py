"""Memory that is reused while a model is materialized."""

from __future__ import annotations

import torch
from torch import Tensor


class ScratchBuffer:
    """Reused memory for one tensor at a time: repeated large allocations fragment the heap."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def flat(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialized flat tensor. It invalidates the previous one."""
        size = numel * dtype.itemsize
        if self._memory.numel() < size:
            self._memory = torch.empty(0, dtype=torch.uint8, device=self._memory.device)
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._memory.device)
        return self._memory[:size].view(dtype)
