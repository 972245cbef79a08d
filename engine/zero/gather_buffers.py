"""Which block of weights is gathered where: fixed slots.

A block must come back for backward at the address it had in forward, and nothing is allocated in a
step. So blocks take turns in a ring of slots, block i always in slot i mod k: one computes while
its neighbour is gathered into the other, and the last k blocks of forward are still there when
backward begins. Blocks that live while others come and go get a slot of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor, nn

from rayzero.engine.comm.backend import Work
from rayzero.engine.zero.parameters import ShardedWeights


class BlockState(Enum):
    """What a block's parameters hold."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


@dataclass(eq=False)
class Block:
    """A module and the units that its forward needs gathered.

    Attributes:
        turn: its slot in the ring; None when it has a slot of its own.
        forwards: how many of its forwards are under way.
        calls: forwards begun in the pass at hand.
    """

    name: str
    module: nn.Module
    units: tuple[ShardedWeights, ...]
    buffer_index: int | None = None
    state: BlockState = BlockState.SHARDED
    pending: list[Work] = field(default_factory=list)
    active_forwards: int = 0
    forward_calls: int = 0


def assign_buffers(order: Sequence[int], alone: set[int], count: int) -> dict[int, int | None]:
    """The slot of each block: round robin in the order of first use, None for those in `alone`."""
    turns: dict[int, int | None] = {}
    for block in order:
        if block not in turns:
            shared = sum(turn is not None for turn in turns.values())
            turns[block] = None if block in alone else shared % count
    return turns


class GatherBuffers:
    """Owns the slots' memory, and knows who is in each.

    Each slot of the ring has one buffer for every place in a block (its trainable unit, its frozen
    unit, other dtypes), as long as the longest unit that may come there.
    """

    def __init__(self, blocks: Sequence[Block], count: int) -> None:
        self.count = count
        self._blocks = blocks
        self._buffers: dict[tuple[int | Block, int, torch.dtype], Tensor] = {}
        self._current_blocks: dict[int, Block] = {}

    def current_block(self, block: Block) -> Block | None:
        """The other block that sits in this block's slot."""
        if block.buffer_index is None:
            return None
        other = self._current_blocks.get(block.buffer_index)
        return None if other is block else other

    def acquire(self, block: Block) -> list[Tensor]:
        """Puts a block in its slot; one buffer for each of its units."""
        if block.buffer_index is not None:
            self._current_blocks[block.buffer_index] = block
        return [self._buffer_for(block, place) for place in range(len(block.units))]

    def give_own_buffer(self, block: Block) -> None:
        """Gives a block that is not gathered a slot of its own."""
        if block.buffer_index is not None and self._current_blocks.get(block.buffer_index) is block:
            del self._current_blocks[block.buffer_index]
        block.buffer_index = None

    def set_assignment(self, turns: dict[int, int | None]) -> None:
        """Moves every block to a new plan. No block may be gathered."""
        self._current_blocks.clear()
        self._buffers.clear()
        for index, turn in turns.items():
            self._blocks[index].buffer_index = turn

    def clear(self) -> None:
        self._current_blocks.clear()

    @property
    def total_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def _buffer_for(self, block: Block, place: int) -> Tensor:
        unit = block.units[place]
        owner: int | Block = block if block.buffer_index is None else block.buffer_index
        key = owner, place, unit.shard.dtype
        if key not in self._buffers:
            sharers = [block] if block.buffer_index is None else self._blocks
            numel = max(
                other.units[place].layout.numel
                for other in sharers
                if len(other.units) > place
                and other.units[place].shard.dtype == unit.shard.dtype
                and other.buffer_index == block.buffer_index
            )
            # A buffer made in inference mode could never be trained with.
            with torch.inference_mode(False):
                self._buffers[key] = unit.new_buffer(numel)
        return self._buffers[key]
