"""Where a unit's gradients go as autograd hands them out.

A gradient is copied (the first of a step) or added into the unit's flat buffer and let go, which
costs one pass; accumulating into a zeroed `.grad` would cost three.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from rayzero.engine.comm.collectives import Pending, Sums
from rayzero.engine.comm.put import put
from rayzero.engine.layout.partition import UnitLayout
from rayzero.engine.offload.place import Place
from rayzero.engine.zero.placement import Collective
from rayzero.engine.zero.weights import views_of


class GradStore(Protocol):
    """One unit's gradients on this rank."""

    @property
    def needs_slot(self) -> bool:
        """Whether the next `take` has to find a slot first."""

    def take(self, index: int, grad: Tensor, *, add: bool) -> None:
        """A gradient of parameter `index`, to be added to what is there or to replace it."""

    def take_nothing(self, index: int) -> None:
        """Parameter `index` had no part in the loss on this rank: its gradient is zero."""

    def reduce(self, sums: Sums, *, first: bool) -> Pending:
        """Starts to sum over the ranks. All parameters have been taken."""

    def reduced(self, summed: Pending) -> None:
        """Called once after the pending sum has been waited for."""

    def owned(self) -> Tensor:
        """The main grads the optimizer of this rank uses, in the layout's coordinates."""

    def counted(self, shard: slice) -> Tensor:
        """This rank's part in the gradient norm: over all ranks, each element once."""

    @property
    def resting(self) -> dict[Place, Tensor]:
        """What stays between two steps."""


class PartialGrads:
    """The whole unit, one buffer for good; summed over the ranks at the end of a step."""

    needs_slot = False

    def __init__(self, layout: UnitLayout, flat: Tensor, owned: slice, how: Collective) -> None:
        self._flat = flat  # zeros: the padding is never written
        self._own = flat[owned]
        self._how = how
        self._views = views_of(layout, flat)

    def take(self, index: int, grad: Tensor, *, add: bool) -> None:
        put(self._views[index], grad, add=add)

    def take_nothing(self, index: int) -> None:
        self._views[index].zero_()

    def reduce(self, sums: Sums, *, first: bool) -> Pending:
        if self._how is Collective.ALL_REDUCE:
            return sums.all_reduce(self._flat)
        return sums.reduce_scatter(self._flat, self._own)

    def reduced(self, summed: Pending) -> None:
        return

    def owned(self) -> Tensor:
        return self._own

    def counted(self, shard: slice) -> Tensor:
        return self._flat[shard]

    @property
    def resting(self) -> dict[Place, Tensor]:
        return {Place.DEVICE: self._flat}


class GradSlots:
    """A few buffers that units' gradients pass through on their way into the shards.

    A slot belongs to a unit from its first gradient of a micro-step until its sum has been waited
    for. When all are taken, the reducer waits for the oldest sum under way; another slot is made
    only when none is under way, which is when gradients arrive out of order.

    Args:
        make: makes a slot: zeros, as long as the longest unit.
        count: how many may be made before waiting is tried.
    """

    def __init__(self, make: Callable[[], Tensor], count: int) -> None:
        self._make = make
        self._count = count
        self.buffers: list[Tensor] = []
        self._free: deque[tuple[Tensor, Pending]] = deque()  # the one given back first comes first

    @property
    def exhausted(self) -> bool:
        return not self._free and len(self.buffers) >= self._count

    def take(self) -> Tensor:
        """A slot that no rank reads any more."""
        if not self._free:
            self.buffers.append(self._make())
            return self.buffers[-1]
        buffer, summed = self._free.popleft()
        summed.release()
        return buffer

    def give_back(self, buffer: Tensor, summed: Pending) -> None:
        """`summed` is the sum that the slot's content went into; it has been waited for."""
        self._free.append((buffer, summed))


class ShardedGrads:
    """This rank's shard of the sum; whole gradients exist only in a slot, within a micro-step."""

    def __init__(self, layout: UnitLayout, shard: Tensor, slots: GradSlots) -> None:
        self._layout = layout
        self._shard = shard
        self._slots = slots
        self._slot: Tensor | None = None  # being filled
        self._leaving: deque[Tensor] = deque()  # being summed, oldest first
        self._views: dict[int, list[Tensor]] = {}  # by the slot's address; slots live for good
        self._gaps: dict[int, list[Tensor]] = {}

    @property
    def needs_slot(self) -> bool:
        return self._slot is None

    def take(self, index: int, grad: Tensor, *, add: bool) -> None:
        put(self._in_slot()[index], grad, add=add)

    def take_nothing(self, index: int) -> None:
        self._in_slot()[index].zero_()

    def _in_slot(self) -> list[Tensor]:
        if self._slot is None:
            self._slot = self._slots.take()
            key = self._slot.data_ptr()
            if key not in self._views:
                self._views[key] = views_of(self._layout, self._slot)
                self._gaps[key] = [self._slot[gap] for gap in self._layout.gaps]
            for gap in self._gaps[key]:  # another unit's numbers may lie there
                gap.zero_()
        return self._views[self._slot.data_ptr()]

    def reduce(self, sums: Sums, *, first: bool) -> Pending:
        self._in_slot()
        slot, self._slot = self._slot, None
        if slot is None:
            raise RuntimeError("a unit was reduced without a slot")
        self._leaving.append(slot)
        return self._sum(sums, slot[: self._layout.numel], first=first)

    def _sum(self, sums: Sums, full: Tensor, *, first: bool) -> Pending:
        return sums.reduce_scatter(full, self._shard, accumulate=not first)

    def reduced(self, summed: Pending) -> None:
        self._slots.give_back(self._leaving.popleft(), summed)

    def owned(self) -> Tensor:
        return self._shard

    def counted(self, shard: slice) -> Tensor:
        return self._shard

    @property
    def resting(self) -> dict[Place, Tensor]:
        return {Place.DEVICE: self._shard}
