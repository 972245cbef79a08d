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
from rayzero.engine.zero.gathers import WeightWay
from rayzero.engine.zero.slots import Block, BlockState, WeightSlots, plan_turns


class Gatherer:
    """Brings blocks' weights in before their forward and backward."""

    def __init__(self, blocks: Sequence[Block], slots: WeightSlots, way: WeightWay) -> None:
        self._blocks = blocks
        self._slots = slots
        self.way = way
        self._alone = _ancestors(blocks)
        self._order: list[Block] = []  # first uses, in forward order, since the last plan
        self._follows: dict[tuple[str, Block], Block] = {}
        self._previous: tuple[str, Block] | None = None
        self._ahead = False  # the plan is made from what was seen: gathering ahead is safe
        self._in_backward = False
        slots.set_turns(self._plan(range(len(blocks))))

    def begin_pass(self) -> None:
        """The model's forward is about to run; also when backward runs it again, checkpointed."""
        if self._in_backward:
            return
        self._previous = None
        for block in self._blocks:
            block.calls = 0

    def enter(self, block: Block) -> None:
        """A block's forward is about to run; also when a checkpointed one runs again.

        Raises:
            EngineError: a block that was used on its own is now called inside another one that
                shares its slot.
        """
        self._make_way(block)
        self._ensure(block)
        if not self._in_backward:
            self._learn(block)
            self._note("forward", block)
        block.forwards += 1
        self._gather_ahead("backward" if self._in_backward else "forward", block)

    def leave(self, block: Block) -> None:
        """A block's forward has run, or has raised."""
        block.forwards -= 1

    def begin_backward(self) -> None:
        self._in_backward = True
        self._previous = None

    def enter_backward(self, block: Block) -> None:
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
        self._ensure(block)
        self._note("backward", block)
        self._gather_ahead("backward", block)

    def end_backward(self) -> None:
        self._in_backward = False
        self._previous = None

    def invalidate(self) -> None:
        """The shards were updated: what is gathered is old. Takes up a better plan, if one is due.

        Here no graph may be alive that a later backward would use, so addresses may change.
        """
        for block in self._blocks:
            self._release(block)
        self._slots.vacate()
        self.way.invalidate()
        if not self._ahead and self._order:
            known = [self._blocks.index(block) for block in self._order]
            rest = [index for index in range(len(self._blocks)) if index not in known]
            self._slots.set_turns(self._plan([*known, *rest]))
            self._ahead = True

    def _ensure(self, block: Block) -> None:
        if block.state is BlockState.SHARDED:
            self._start(block)
        if block.state is BlockState.GATHERING:
            self._settle(block)

    def _start(self, block: Block) -> None:
        other = self._slots.occupant(block)
        if other is not None:
            self._release(other)
        buffers = self._slots.occupy(block)
        block.pending = [
            unit.attach(buffer, self.way.of(unit))
            for unit, buffer in zip(block.units, buffers, strict=True)
        ]
        block.state = BlockState.GATHERING

    def _settle(self, block: Block) -> None:
        for pending in block.pending:
            pending.wait()
        block.pending = []
        block.state = BlockState.GATHERED

    def _release(self, block: Block) -> None:
        if block.state is BlockState.GATHERING:  # gathered ahead and not used: still being written
            self._settle(block)
        if block.state is BlockState.GATHERED:
            for unit in block.units:
                unit.detach()
            block.state = BlockState.SHARDED

    def _gather_ahead(self, phase: str, block: Block) -> None:
        if not self._ahead:
            return
        kept = [block]
        for coming in self._coming(phase, block):
            other = self._slots.occupant(coming)
            if coming.state is not BlockState.SHARDED:
                kept.append(coming)
            elif other in kept or (other is not None and other.forwards):
                return
            else:
                self._start(coming)
                kept.append(coming)

    def _coming(self, phase: str, block: Block) -> Iterator[Block]:
        """The blocks that followed this one last time, as many as there are other slots."""
        for _ in range(self._slots.count - 1):
            following = self._follows.get((phase, block))
            if following is None:
                return
            yield following
            block = following

    def _note(self, phase: str, block: Block) -> None:
        here = phase, block
        if self._previous is not None and self._previous[0] == phase:
            self._follows[self._previous] = block
        self._previous = here

    def _learn(self, block: Block) -> None:
        """Sees what the plan must know: the order, blocks called twice, blocks around blocks."""
        block.calls += 1
        if block.calls == 1 and not self._ahead:
            self._order.append(block)
        around = {index for index, other in enumerate(self._blocks) if other.forwards}
        if block.calls > 1:
            around.add(self._blocks.index(block))
        if around - self._alone:
            self._alone |= around
            self._ahead = False
            self._order = self._order or list(self._blocks)

    def _make_way(self, block: Block) -> None:
        """A block that is called inside another one of the ring leaves the ring.

        At its first use in a pass only: afterwards autograd may hold views of its address.
        """
        if block.turn is None or not any(
            other.forwards and other.turn is not None
            for other in self._blocks
            if other is not block
        ):
            return
        if not block.calls:
            self._release(block)
            self._slots.move_out(block)
            self._alone.add(self._blocks.index(block))
            return
        other = self._slots.occupant(block)
        if other is not None and other.forwards:
            raise EngineError(
                f"the block {block.name!r} is called on its own and then inside {other.name!r}, "
                "which shares its slot",
                fix="rayzero.unit_classes in the engine config: name classes that do not nest",
            )

    def _plan(self, order: Sequence[int]) -> dict[int, int | None]:
        return plan_turns(order, self._alone, self._slots.count)


def _ancestors(blocks: Sequence[Block]) -> set[int]:
    """The blocks whose module contains another block's: they live while those come and go."""
    modules = {id(block.module) for block in blocks}
    return {
        index
        for index, block in enumerate(blocks)
        if any(
            id(child) in modules for child in block.module.modules() if child is not block.module
        )
    }
