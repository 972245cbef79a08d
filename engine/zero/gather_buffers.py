"""Fixed buffers that blocks of sharded weights are gathered into.

A block must have the same address in backward as in forward, and a step must not allocate. So
blocks share a ring of k buffers, with block i always in buffer i mod k. While one block computes,
the next is gathered into another buffer. The last k blocks of forward are still gathered when
backward begins. Blocks that must stay gathered while others run get a buffer of their own. Large
modules outside the repeated blocks (an embedding, a head) share one more buffer. The ring's buffers
would otherwise have to be as long as the longest of them.

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
    """The content of a block's parameters. A block goes through the states in turn, in a cycle."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


@dataclass(eq=False)
class Block:
    """A module and the units that its forward needs gathered.

    Attributes:
        large: a module outside the repeated blocks that owns large parameters.
        buffer_index: the block's buffer in the ring, or that of the large modules. None if the
            block has a buffer of its own.
        buffers: one tensor for each unit. Empty until the block is first gathered.
        pending: the all-gathers in flight while GATHERING.
        forward_calls: how many forwards have begun in the current pass.
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
        """Forgets the buffers, and the gathers in flight. Their process group is gone."""
        self.pending = []
        self.buffers = []
        self.forward_calls = 0
        self.state = BlockState.SHARDED


class GatherBuffers:
    """Owns the buffers' memory, and records which block occupies each buffer.

    A buffer consists of one tensor for each unit of a block (trainable, frozen, other dtypes). The
    tensor is as long as the longest unit that may be gathered there.
    """

    def __init__(self, blocks: Sequence[Block], count: int) -> None:
        self.count = count
        self._blocks = blocks
        self._buffers: dict[tuple[int | Block, int, torch.dtype], Tensor] = {}
        self._current_blocks: dict[int, Block] = {}

    def current_block(self, block: Block) -> Block | None:
        """Returns the other block that occupies this block's buffer, or None."""
        if block.buffer_index is None:
            return None
        other = self._current_blocks.get(block.buffer_index)
        return None if other is block else other

    def acquire(self, block: Block) -> list[Tensor]:
        """Marks a block's buffer as occupied by it. Returns one tensor for each of its units."""
        if block.buffer_index is not None:
            self._current_blocks[block.buffer_index] = block
        if not block.buffers:
            block.buffers = [self._buffer_for(block, index) for index in range(len(block.units))]
        return block.buffers

    def give_own_buffer(self, block: Block) -> None:
        """Gives a block a buffer of its own. The block must not be gathered."""
        if block.buffer_index is not None and self._current_blocks.get(block.buffer_index) is block:
            del self._current_blocks[block.buffer_index]
        block.buffer_index, block.buffers = None, []

    def assign(self, order: Iterable[Block], alone: Container[Block]) -> None:
        """Assigns the ring's buffers round robin to blocks in `order`, that of first use. Blocks in
        `alone` get their own buffers, large modules their common one. No block may be gathered."""
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
            sharing = [block] if block.buffer_index is None else self._blocks
            numel = max(
                other.units[position].layout.numel
                for other in sharing
                if len(other.units) > position
                and other.units[position].shard.dtype == unit.shard.dtype
                and other.buffer_index == block.buffer_index
            )
            # Autograd refuses buffers that were made in inference mode.
            with torch.inference_mode(False):
                self._buffers[key] = unit.new_buffer(numel)
        return self._buffers[key]
