"""Buffers for codes, kept and used again: once all are made, nothing is allocated in a step."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from rayzero.engine.comm.collectives import Collectives, Pending


class CodeBuffers:
    """Bytes that collectives may be called on. All are as long as the longest asked for so far."""

    def __init__(self, collectives: Collectives, device: torch.device) -> None:
        self._collectives = collectives
        self._device = device
        self._largest = 0
        self._free: deque[tuple[Tensor, Pending]] = deque()  # given back first, taken first
        self.total_bytes = 0

    def take(self, nbytes: int) -> Tensor:
        """A buffer of at least so many bytes, which no rank reads any more."""
        self._largest = max(self._largest, nbytes)
        for index, (buffer, last) in enumerate(self._free):
            if buffer.numel() >= nbytes:
                del self._free[index]
                last.release()
                return buffer
        buffer = self._collectives.zeros(self._largest, torch.uint8, self._device)
        self.total_bytes += buffer.nbytes
        return buffer

    def give_back(self, buffer: Tensor, last: Pending) -> None:
        """`last` is the exchange that other ranks read the buffer in; it has been waited for."""
        self._free.append((buffer, last))
