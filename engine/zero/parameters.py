"""Weight stores: replicated, sharded, host-resident.

Where a unit's model weights rest: whole on every rank, or this rank's shard only.

Either way the model's parameters are views of one flat buffer while they are in use. Their
addresses never change between forward and backward, because autograd keeps views of a weight as it
was in forward (a linear layer saves `weight.t()`).

Model weights whose shards rest in host memory and visit the device when a unit is gathered.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from rayzero.engine.comm.backend import CompletedWork, GatherOp, Work, rank_chunk
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.layout.flat_layout import UnitLayout
from rayzero.engine.offload.transfer import HostShardGather, MemoryKind


class ReplicatedWeights:
    """Replicated: the flat buffer is there for good, the parameters are views of it."""

    memory_kind = MemoryKind.DEVICE

    def __init__(self, layout: UnitLayout, params: tuple[nn.Parameter, ...], flat: Tensor) -> None:
        self.flat = flat
        for param, view in zip(params, param_views(layout, flat), strict=True):
            set_param_data(param, view)

    def owned_range(self, owned: slice) -> Tensor:
        """The range of model weights whose main weights this rank updates."""
        return self.flat[owned]

    def gather_updates(self, collectives: Collectives, *, gather: bool) -> Work:
        """Brings the other ranks' updates in, when each rank has updated its own part only."""
        if not gather:
            return CompletedWork()
        own = rank_chunk(self.flat, collectives.rank, collectives.world_size)
        return collectives.all_gather(self.flat, own)

    @property
    def persistent_tensor(self) -> Tensor:
        return self.flat


class ShardedWeights:
    """Sharded: the parameters have values only while the unit is attached to a slot.

    Detached, a parameter keeps its shape but reads as NaN everywhere, so that a weight used without
    its block's forward shows at once instead of giving stale numbers.
    """

    memory_kind = MemoryKind.DEVICE

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
        poison = torch.full((), _poison_value(shard.dtype), dtype=shard.dtype, device=self.device)
        self._poisoned_values = tuple(poison.expand(spec.shape) for spec in layout.params)
        self._buffer: Tensor | None = None
        self._views: tuple[Tensor, ...] = ()
        for param, value in zip(params, self._poisoned_values, strict=True):
            set_param_data(param, value)

    def owned_range(self, owned: slice) -> Tensor:
        """The range of model weights whose main weights this rank updates: all that it has."""
        return self.shard

    def gather_updates(self, collectives: Collectives, *, gather: bool) -> Work:
        return CompletedWork()

    def unshard(self, slot: Tensor, gathers: GatherOp) -> Work:
        """Starts to gather the unit into `slot` and points the parameters there.

        Args:
            slot: at least `layout.numel` elements, which no kernel enqueued later may still read.
        """
        if self._buffer is not slot:
            self._buffer = slot
            self._views = tuple(param_views(self.layout, slot))
        pending = self._all_gather(slot[: self.layout.numel], gathers)
        for param, view in zip(self.params, self._views, strict=True):
            param.data = view
        return pending

    def _all_gather(self, full: Tensor, gathers: GatherOp) -> Work:
        return gathers.all_gather(full, self.shard)

    def new_buffer(self, numel: int) -> Tensor:
        """A buffer of zeros to be attached to."""
        return self.shard.new_zeros(numel)

    def reshard(self) -> None:
        """The slot is about to hold another unit."""
        for param, value in zip(self.params, self._poisoned_values, strict=True):
            param.data = value

    @property
    def persistent_tensor(self) -> Tensor:
        return self.shard


WeightStore = ReplicatedWeights | ShardedWeights


def param_views(layout: UnitLayout, flat: Tensor) -> list[Tensor]:
    """Each parameter's part of a flat buffer, in its own shape."""
    return [
        flat[layout.param_range(index)].view(spec.shape) for index, spec in enumerate(layout.params)
    ]


def set_param_data(param: nn.Parameter, value: Tensor) -> None:
    """Makes `value` the parameter's data, keeping the Parameter object that users hold."""
    if param.device.type == "meta" or param.dtype != value.dtype:
        real = nn.Parameter(value, requires_grad=param.requires_grad)
        torch.utils.swap_tensors(param, real)
    else:
        param.data = value


def _poison_value(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point or dtype.is_complex else 0


class HostShardedWeights(ShardedWeights):
    """Sharded, the shard in host memory: no element of it stays on the device.

    Args:
        shard: in host memory.
        path: one for all units of a run.
    """

    memory_kind = MemoryKind.HOST

    def __init__(
        self,
        layout: UnitLayout,
        params: tuple[nn.Parameter, ...],
        shard: Tensor,
        path: HostShardGather,
    ) -> None:
        super().__init__(layout, params, shard, path.device)
        self._shard_gather = path

    def _all_gather(self, full: Tensor, gathers: GatherOp) -> Work:
        return self._shard_gather.gather(full, self.shard, gathers)

    def new_buffer(self, numel: int) -> Tensor:
        return self._shard_gather.new_buffer(numel, self.shard.dtype)


class WeightGather(Protocol):
    """How a run's sharded weights travel."""

    def gather_op(self, unit: ShardedWeights) -> GatherOp:
        """What gathers a unit."""

    def invalidate(self) -> None:
        """Shards were updated: copies of what was gathered before are old."""

    @property
    def secondary_bytes(self) -> int:
        """Bytes of second shards."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that codes pass through."""
