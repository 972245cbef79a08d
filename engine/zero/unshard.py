"""When blocks of sharded weights are gathered: before use, ahead of use, and never twice at once.

The gatherer learns which block follows which, in forward and in backward, and gathers the next one
while this one computes.

Why a slot may be overwritten. In forward, when another block is entered, its occupant has left. In
backward, autograd runs nodes of one device in reverse order of creation, so when a later-created
block's output gradient is followed by an earlier one's, the later block is done; on CUDA its
kernels are enqueued before the collective that overwrites the slot. The exception is a block inside
which another one is called: it gets a slot of its own as soon as that has been seen, and until then
nothing is gathered ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rayzero.engine.errors import EngineError
from rayzero.engine.zero.gather_buffers import Block, BlockState, GatherBuffers, assign_buffers
from rayzero.engine.zero.parameters import WeightGather


class UnshardScheduler:
    """Brings blocks' weights in before their forward and backward."""

    def __init__(self, blocks: Sequence[Block], slots: GatherBuffers, way: WeightGather) -> None:
        self._blocks = blocks
        self._buffers = slots
        self.weight_gather = way
        self._own_buffer = _blocks_around_blocks(blocks)
        self._forward_order: list[Block] = []  # first uses, in forward order, since the last plan
        self._successor: dict[tuple[str, Block], Block] = {}
        self._previous: tuple[str, Block] | None = None
        self._prefetch_ready = False  # the plan is made from what was seen: gathering ahead is safe
        self._in_backward = False
        slots.set_assignment(self._assign_buffers(range(len(blocks))))

    def root_pre_forward(self) -> None:
        """The model's forward is about to run; also when backward runs it again, checkpointed."""
        if self._in_backward:
            return
        self._previous = None
        for block in self._blocks:
            block.forward_calls = 0

    def pre_forward(self, block: Block) -> None:
        """A block's forward is about to run; also when a checkpointed one runs again.

        Raises:
            EngineError: a block that was used on its own is now called inside another one that
                shares its slot.
        """
        self._leave_ring(block)
        self._unshard(block)
        if not self._in_backward:
            self._record_order(block)
            self._record_successor("forward", block)
        block.active_forwards += 1
        self._prefetch("backward" if self._in_backward else "forward", block)

    def post_forward(self, block: Block) -> None:
        """A block's forward has run, or has raised."""
        block.active_forwards -= 1

    def begin_backward(self) -> None:
        self._in_backward = True
        self._previous = None

    def pre_backward(self, block: Block) -> None:
        """The gradient of one of a block's outputs is there; its own backward comes next.

        Raises:
            EngineError: this backward was not begun. What it builds for a second derivative would
                read weights when nobody gathers them.
        """
        if not self._in_backward:
            raise EngineError(
                f"a gradient reached the block {block.name!r} outside engine.backward()",
                allowed="at stage 3, gradients through engine.backward(loss) only",
                fix="zero_optimization.stage 2 or less, for torch.autograd.grad and second "
                "derivatives",
            )
        self._unshard(block)
        self._record_successor("backward", block)
        self._prefetch("backward", block)

    def end_backward(self) -> None:
        self._in_backward = False
        self._previous = None

    def invalidate(self) -> None:
        """The shards were updated: what is gathered is old. Takes up a better plan, if one is due.

        Here no graph may be alive that a later backward would use, so addresses may change.
        """
        for block in self._blocks:
            self._reshard(block)
        self._buffers.clear()
        self.weight_gather.invalidate()
        if not self._prefetch_ready and self._forward_order:
            known = [self._blocks.index(block) for block in self._forward_order]
            rest = [index for index in range(len(self._blocks)) if index not in known]
            self._buffers.set_assignment(self._assign_buffers([*known, *rest]))
            self._prefetch_ready = True

    def _unshard(self, block: Block) -> None:
        if block.state is BlockState.SHARDED:
            self._start_all_gather(block)
        if block.state is BlockState.GATHERING:
            self._wait_all_gather(block)

    def _start_all_gather(self, block: Block) -> None:
        other = self._buffers.current_block(block)
        if other is not None:
            self._reshard(other)
        buffers = self._buffers.acquire(block)
        block.pending = [
            unit.unshard(buffer, self.weight_gather.gather_op(unit))
            for unit, buffer in zip(block.units, buffers, strict=True)
        ]
        block.state = BlockState.GATHERING

    def _wait_all_gather(self, block: Block) -> None:
        for pending in block.pending:
            pending.wait()
        block.pending = []
        block.state = BlockState.GATHERED

    def _reshard(self, block: Block) -> None:
        if block.state is BlockState.GATHERING:  # gathered ahead and not used: still being written
            self._wait_all_gather(block)
        if block.state is BlockState.GATHERED:
            for unit in block.units:
                unit.reshard()
            block.state = BlockState.SHARDED

    def _prefetch(self, phase: str, block: Block) -> None:
        if not self._prefetch_ready:
            return
        kept = [block]
        for coming in self._next_blocks(phase, block):
            other = self._buffers.current_block(coming)
            if coming.state is not BlockState.SHARDED:
                kept.append(coming)
            elif other in kept or (other is not None and other.active_forwards):
                return
            else:
                self._start_all_gather(coming)
                kept.append(coming)

    def _next_blocks(self, phase: str, block: Block) -> Iterator[Block]:
        """The blocks that followed this one last time, as many as there are other slots."""
        for _ in range(self._buffers.count - 1):
            following = self._successor.get((phase, block))
            if following is None:
                return
            yield following
            block = following

    def _record_successor(self, phase: str, block: Block) -> None:
        here = phase, block
        if self._previous is not None and self._previous[0] == phase:
            self._successor[self._previous] = block
        self._previous = here

    def _record_order(self, block: Block) -> None:
        """Sees what the plan must know: the order, blocks called twice, blocks around blocks."""
        block.forward_calls += 1
        if block.forward_calls == 1 and not self._prefetch_ready:
            self._forward_order.append(block)
        around = {index for index, other in enumerate(self._blocks) if other.active_forwards}
        if block.forward_calls > 1:
            around.add(self._blocks.index(block))
        if around - self._own_buffer:
            self._own_buffer |= around
            self._prefetch_ready = False
            self._forward_order = self._forward_order or list(self._blocks)

    def _leave_ring(self, block: Block) -> None:
        """A block that is called inside another one of the ring leaves the ring.

        At its first use in a pass only: afterwards autograd may hold views of its address.
        """
        if block.buffer_index is None or not any(
            other.active_forwards and other.buffer_index is not None
            for other in self._blocks
            if other is not block
        ):
            return
        if not block.forward_calls:
            self._reshard(block)
            self._buffers.give_own_buffer(block)
            self._own_buffer.add(self._blocks.index(block))
            return
        other = self._buffers.current_block(block)
        if other is not None and other.active_forwards:
            raise EngineError(
                f"the block {block.name!r} is called on its own and then inside {other.name!r}, "
                "which shares its slot",
                fix="rayzero.unshard_modules in the engine config: name classes that do not nest",
            )

    def _assign_buffers(self, order: Sequence[int]) -> dict[int, int | None]:
        return assign_buffers(order, self._own_buffer, self._buffers.count)


def _blocks_around_blocks(blocks: Sequence[Block]) -> set[int]:
    """The blocks whose module contains another block's: they live while those come and go."""
    modules = {id(block.module) for block in blocks}
    return {
        index
        for index, block in enumerate(blocks)
        if any(
            id(child) in modules for child in block.module.modules() if child is not block.module
        )
    }
