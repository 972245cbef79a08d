"""Where a unit's model weights rest: whole on every rank, or this rank's shard only.

Either way the model's parameters are views of one flat buffer while they are in use. Their
addresses never change between forward and backward, because autograd keeps views of a weight as it
was in forward (a linear layer saves `weight.t()`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rayzero.engine.comm.collectives import Collectives, Done, Gathers, Pending, part_of
from rayzero.engine.layout.partition import UnitLayout
from rayzero.engine.offload.place import Place


class ResidentWeights:
    """Replicated: the flat buffer is there for good, the parameters are views of it."""

    rests = Place.DEVICE

    def __init__(self, layout: UnitLayout, params: tuple[nn.Parameter, ...], flat: Tensor) -> None:
        self.flat = flat
        for param, view in zip(params, views_of(layout, flat), strict=True):
            adopt(param, view)

    def part(self, owned: slice) -> Tensor:
        """The range of model weights whose main weights this rank updates."""
        return self.flat[owned]

    def after_update(self, collectives: Collectives, *, gather: bool) -> Pending:
        """Brings the other ranks' updates in, when each rank has updated its own part only."""
        if not gather:
            return Done()
        own = part_of(self.flat, collectives.rank, collectives.world_size)
        return collectives.all_gather(self.flat, own)

    @property
    def resting(self) -> Tensor:
        return self.flat


class ShardedWeights:
    """Sharded: the parameters have values only while the unit is attached to a slot.

    Detached, a parameter keeps its shape but reads as NaN everywhere, so that a weight used without
    its block's forward shows at once instead of giving stale numbers.
    """

    rests = Place.DEVICE

    def __init__(
        self,
        layout: UnitLayout,
        params: tuple[nn.Parameter, ...],
        shard: Tensor,
        device: torch.device | None = None,
    ) -> None:
        self.layout = layout
        self.shard = shard
        self.params = params
        self.device = device or shard.device  # where they are used; the shard may rest elsewhere
        poison = torch.full((), _poison(shard.dtype), dtype=shard.dtype, device=self.device)
        self._detached = tuple(poison.expand(spec.shape) for spec in layout.params)
        self._slot: Tensor | None = None
        self._views: tuple[Tensor, ...] = ()
        for param, value in zip(params, self._detached, strict=True):
            adopt(param, value)

    def part(self, owned: slice) -> Tensor:
        """The range of model weights whose main weights this rank updates: all that it has."""
        return self.shard

    def after_update(self, collectives: Collectives, *, gather: bool) -> Pending:
        return Done()

    def attach(self, slot: Tensor, gathers: Gathers) -> Pending:
        """Starts to gather the unit into `slot` and points the parameters there.

        Args:
            slot: at least `layout.numel` elements, which no kernel enqueued later may still read.
        """
        if self._slot is not slot:
            self._slot = slot
            self._views = tuple(views_of(self.layout, slot))
        pending = self._gather(slot[: self.layout.numel], gathers)
        for param, view in zip(self.params, self._views, strict=True):
            param.data = view
        return pending

    def _gather(self, full: Tensor, gathers: Gathers) -> Pending:
        return gathers.all_gather(full, self.shard)

    def new_slot(self, numel: int) -> Tensor:
        """A buffer of zeros to be attached to."""
        return self.shard.new_zeros(numel)

    def detach(self) -> None:
        """The slot is about to hold another unit."""
        for param, value in zip(self.params, self._detached, strict=True):
            param.data = value

    @property
    def resting(self) -> Tensor:
        return self.shard


WeightStore = ResidentWeights | ShardedWeights


def views_of(layout: UnitLayout, flat: Tensor) -> list[Tensor]:
    """Each parameter's part of a flat buffer, in its own shape."""
    return [flat[layout.extent(index)].view(spec.shape) for index, spec in enumerate(layout.params)]


def adopt(param: nn.Parameter, value: Tensor) -> None:
    """Makes `value` the parameter's data, keeping the Parameter object that users hold."""
    if param.device.type == "meta" or param.dtype != value.dtype:
        real = nn.Parameter(value, requires_grad=param.requires_grad)
        torch.utils.swap_tensors(param, real)
    else:
        param.data = value


def _poison(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point or dtype.is_complex else 0
