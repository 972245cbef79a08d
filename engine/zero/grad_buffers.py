"""Buffers from which gradients are reduced into shards.

Rule of ordering: `gradient-buffers` (docs/engine.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from rayzero.engine.comm.backend import CompletedWork, Work


@dataclass(eq=False, slots=True)
class GradBuffer:
    """Memory that parts of units are reduced from, one after the other; `reduction` is the last."""

    tensor: Tensor
    reduction: Work = field(default_factory=CompletedWork)


class GradBufferPool:
    """A few buffers from which parts of units are reduced into shards, used in turn.

    A part holds a buffer from its launch until the buffer's next use, which waits for its
    reduction: when all are in use, for the oldest in flight.

    Args:
        make: allocates a buffer of zeros of a number of elements.
        count: buffers to allocate, if there are as many parts.
        part_numel: the most elements of a part, without padding.

    Attributes:
        numel: of a buffer: the longest part that was announced before the first `acquire`.
        max_count: the most buffers that there will be.
    """

    def __init__(self, make: Callable[[int], Tensor], count: int, part_numel: int) -> None:
        self.part_numel = part_numel
        self.numel = 0
        self.max_count = 0
        self._make_buffer = make
        self._count = count
        self._ring: deque[GradBuffer] = deque()  # the one used last is the last

    @property
    def buffers(self) -> list[Tensor]:
        return [buffer.tensor for buffer in self._ring]

    def announce(self, parts: int, numel: int) -> None:
        """A unit will need a buffer for each of `parts`, of `numel` elements."""
        self.numel = max(self.numel, numel)
        self.max_count = min(self._count, self.max_count + parts)

    def acquire(self) -> GradBuffer:
        """A buffer that no rank reads any more."""
        if len(self._ring) < self.max_count:
            buffer = GradBuffer(self._make_buffer(self.numel))
        else:
            buffer = self._ring.popleft()
            buffer.reduction.release()
        self._ring.append(buffer)
        return buffer
