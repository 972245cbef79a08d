"""State that an engine which is re-cut still holds, as the first source of its new shards.

Optimizer state that is cut as before is moved, without a copy; any other range that is needed is
copied on the device. Only the rest is read from host memory.

Why it is genuine. Held is what only the engine changes (`TrainingState.private_ranges`), of a state
that was consistent when the group had ended, and its device synchronized. What an abort leaves half
done has written gathered weights, gradients and residuals, none of which is held.

Lifetimes. Tensors are held. Copies run on the current stream, for which they were
allocated: torch's allocator reuses their memory in its order, so `close` may drop them at once.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor

from rayzero.engine.layout.state_index import StateSource, TensorRange
from rayzero.engine.state.ranges import StateRange, pack_block

log = logging.getLogger("rayzero.engine")


class KeptSource(StateSource):
    """A state whose block 0 is what this process holds, and the others `source`'s, which
    has the same values. Owns both until `close`. Used by one thread.

    Attributes:
        bytes_moved, bytes_copied: from what is held.
        bytes_read: from `source`.
    """

    def __init__(self, held: Sequence[StateRange], source: StateSource) -> None:
        packed = pack_block(held)
        self._offsets = packed.offsets
        self._memories: list[Tensor | None] = [part.memory for part in packed.ranges]
        self._by_ranges = {part.ranges: number for number, part in enumerate(packed.ranges)}
        self._source = source
        self.step = source.step
        self.block_indexes = [packed.index, *source.block_indexes]
        self.bytes_moved = self.bytes_copied = self.bytes_read = 0

    def metadata(self, rank: int) -> dict[str, Any]:
        return self._source.metadata(rank)

    def take(
        self, ranges: tuple[TensorRange, ...], like: Tensor, dtype: torch.dtype
    ) -> Tensor | None:
        number = self._by_ranges.get(ranges)
        memory = None if number is None else self._memories[number]
        wanted = like.shape, dtype, like.device
        if memory is None or (memory.shape, memory.dtype, memory.device) != wanted:
            return None
        self.bytes_moved += memory.nbytes
        return memory

    def tensor(self, block: int, offset: int, nbytes: int) -> Tensor | None:
        if block:
            self.bytes_read += nbytes
            return None
        number = bisect_right(self._offsets, offset) - 1
        memory = self._memories[number]
        if memory is None:
            raise RuntimeError(f"byte {offset} of what is held was dropped")
        self.bytes_copied += nbytes
        start = (offset - self._offsets[number]) // memory.itemsize
        return memory[start : start + nbytes // memory.itemsize]

    def drop(self, names: Container[str]) -> None:
        """Frees what is held of these tensors: nothing reads it any more."""
        for ranges, number in self._by_ranges.items():
            if ranges[0].name in names:
                self._memories[number] = None

    def read(self, block: int, offset: int, into: memoryview) -> None:
        self._source.read(block - 1, offset, into)

    def registered_block(self, block: int) -> memoryview | None:
        return self._source.registered_block(block - 1)

    def verify(self, block: int) -> None:
        self._source.verify(block - 1)

    def close(self) -> None:
        log.info(
            "step %d: %d bytes were moved within this process, %d copied, %d read",
            self.step,
            self.bytes_moved,
            self.bytes_copied,
            self.bytes_read,
        )
        self._memories.clear()
        self._by_ranges.clear()
        self._source.close()
