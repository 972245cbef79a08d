"""Fixed buffers that blocks of sharded weights are gathered into.

A block must have the same address in backward as in forward, and a step allocates nothing. So
blocks share a ring of buffers, block i always in buffer i mod k: one computes while the next is
gathered into another, and the last k blocks of forward are still gathered when backward begins.
Blocks that must stay gathered while others run get a buffer of their own. Large modules outside the
repeated blocks (an embedding, a head) share one more buffer, so that it is not the ring that has to
hold the longest of them.

Rule of ordering: `gather-address` (docs/engine.md).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import cycle

import torch
from torch import Tensor, nn

from rayzero.engine.comm.backend import Work
from rayzero.engine.zero.parameters import ShardedWeights


class BlockState(Enum):
    """Content of a block's parameters. Each state follows the one before, in a circle."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


@dataclass(eq=False)
class Block:
    """A module and the units that its forward needs gathered.

    Attributes:
        large: a module outside the repeated blocks that owns large parameters.
        buffer_index: its buffer in the ring, or the large modules'; None if it has its own.
        buffers: one for each unit, once it has been gathered.
        pending: the all-gathers in flight while GATHERING.
        forward_calls: forwards begun in the current pass.
    """

    name: str
    module: nn.Module
    units: list[ShardedWeights]
    large: bool = False
    buffer_index: int | None = None
    buffers: list[Tensor] = field(default_factory=list)
    pending: list[Work] = field(default_factory=list)
    forward_calls: int = 0
    state: BlockState = BlockState.SHARDED

    def abandon(self) -> None:
        """Forgets its buffers, and the gathers in flight of a process group that is gone."""
        self.pending = []
        self.buffers = []
        self.forward_calls = 0
        self.state = BlockState.SHARDED


class GatherBuffers:
    """Owns the buffers' memory, and records which block is in each.

    Each position of the ring has one tensor for every unit of a block (trainable, frozen, other
    dtypes), as long as the longest unit that may be gathered there.
    """

    def __init__(self, blocks: Sequence[Block], count: int) -> None:
        self.count = count
        self._blocks = blocks
        self._buffers: dict[tuple[int | Block, int, torch.dtype], Tensor] = {}
        self._current_blocks: dict[int, Block] = {}

    def current_block(self, block: Block) -> Block | None:
        """The other block that occupies this block's buffer."""
        if block.buffer_index is None:
            return None
        other = self._current_blocks.get(block.buffer_index)
        return None if other is block else other

    def acquire(self, block: Block) -> list[Tensor]:
        """Assigns a block its buffer; one tensor for each of its units."""
        if block.buffer_index is not None:
            self._current_blocks[block.buffer_index] = block
        if not block.buffers:
            block.buffers = [self._buffer_for(block, it) for it in range(len(block.units))]
        return block.buffers

    def give_own_buffer(self, block: Block) -> None:
        """Gives a block that is not gathered a buffer of its own."""
        if block.buffer_index is not None and self._current_blocks.get(block.buffer_index) is block:
            del self._current_blocks[block.buffer_index]
        block.buffer_index, block.buffers = None, []

    def assign(self, order: Iterable[Block], alone: Container[Block]) -> None:
        """Assigns buffers round robin in the order of first use, except to the blocks in `alone`,
        which get their own, and large modules. No block may be gathered."""
        self._current_blocks.clear()
        self._buffers.clear()
        for block in self._blocks:
            block.buffers = []
        indices = cycle(range(self.count))
        for block in dict.fromkeys(order):
            if block in alone:
                block.buffer_index = None
            else:
                block.buffer_index = self.count if block.large else next(indices)

    def clear(self) -> None:
        self._current_blocks.clear()

    @property
    def total_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def _buffer_for(self, block: Block, position: int) -> Tensor:
        unit = block.units[position]
        owner: int | Block = block if block.buffer_index is None else block.buffer_index
        key = owner, position, unit.shard.dtype
        if key not in self._buffers:
            sharers = [block] if block.buffer_index is None else self._blocks
            numel = max(
                other.units[position].layout.numel
                for other in sharers
                if len(other.units) > position
                and other.units[position].shard.dtype == unit.shard.dtype
                and other.buffer_index == block.buffer_index
            )
            # Autograd refuses buffers that were made in inference mode.
            with torch.inference_mode(False):
                self._buffers[key] = unit.new_buffer(numel)
        return self._buffers[key]
