"""Weight stores: one unit's model weights, replicated or sharded.

The model's parameters are views of one flat buffer while they are in use. Their addresses do not
change between forward and backward, because autograd saves views of weights (a linear layer saves
`weight.t()`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rayzero.engine.comm.backend import GatherOp, Work, rank_chunk
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.layout.flat_layout import UnitLayout
from rayzero.engine.layout.packed import is_packed
from rayzero.engine.offload.transfer import HostShardGather, MemoryKind
from rayzero.engine.torch_private import swap_tensors


class ReplicatedWeights:
    """Replicated: the parameters are permanently views of the flat buffer."""

    memory_kind = MemoryKind.DEVICE

    def __init__(self, layout: UnitLayout, params: tuple[nn.Parameter, ...], flat: Tensor) -> None:
        self.persistent_tensor = flat
        self._own: Tensor | None = None
        for param, view in zip(params, param_views(layout, flat), strict=True):
            set_param_data(param, view)

    def owned_range(self, owned: slice) -> Tensor:
        """The range of model weights whose main weights this rank updates."""
        return self.persistent_tensor[owned]

    def gather_updates(self, collectives: Collectives) -> Work:
        """Gathers the other ranks' updates: each rank has updated its own part."""
        full = self.persistent_tensor
        if self._own is None:
            self._own = rank_chunk(full, collectives.rank, collectives.world_size)
        return collectives.all_gather(full, self._own)


class ShardedWeights:
    """Sharded: the parameters have values only while the unit is gathered.

    Otherwise a parameter keeps its shape but reads as NaN, so that a weight used outside its
    block's forward is noticed at once instead of giving stale values. `shard_gather` gathers shards
    in host memory or a file, one for all units of a run; None if they are on the device.
    """

    def __init__(
        self,
        layout: UnitLayout,
        params: tuple[nn.Parameter, ...],
        shard: Tensor,
        shard_gather: HostShardGather | None = None,
    ) -> None:
        self.layout = layout
        self.shard = self.persistent_tensor = shard
        self.params = params
        self._shard_gather = shard_gather
        self.memory_kind = MemoryKind.DEVICE if shard_gather is None else shard_gather.memory_kind
        nan = float("nan") if shard.is_floating_point() or shard.is_complex() else 0
        self.device = shard.device if shard_gather is None else shard_gather.device
        poison = torch.full((), nan, dtype=shard.dtype, device=self.device)
        poisoned_values = [poison.expand(spec.shape) for spec in layout.params]
        for param, value in zip(params, poisoned_values, strict=True):
            set_param_data(param, value)
        self._poisoned = list(zip(params, poisoned_values, strict=True))
        # Numbers of no meaning to others: only their bits count.
        self.packed = not shard.is_floating_point() or is_packed(params[0])
        self._gathered: list[tuple[nn.Parameter, Tensor]] = []  # as of the last `unshard`
        self._buffer: Tensor | None = None  # that these are in, and its part that is gathered
        self._full = shard

    def owned_range(self, owned: slice) -> Tensor:
        """The range of model weights whose main weights this rank updates: all that it has."""
        return self.shard

    def unshard(self, buffer: Tensor, gather_op: GatherOp) -> Work:
        """Starts to gather the unit into `buffer` and points the parameters there. It has at least
        `layout.numel` elements, which no kernel enqueued later reads."""
        if self._buffer is not buffer:
            self._buffer, self._full = buffer, buffer[: self.layout.numel]
            views = param_views(self.layout, buffer)
            self._gathered = list(zip(self.params, views, strict=True))
        if self._shard_gather is None:
            pending: Work = gather_op.all_gather(self._full, self.shard)
        else:
            pending = self._shard_gather.gather(self._full, self.shard, gather_op)
        for param, view in self._gathered:
            param.data = view
        return pending

    def new_buffer(self, numel: int) -> Tensor:
        """A buffer of zeros to gather into."""
        if self._shard_gather is None:
            return self.shard.new_zeros(numel)
        return self._shard_gather.new_buffer(numel, self.shard.dtype)

    def is_poisoned(self, param: nn.Parameter) -> bool:
        """Whether one of the unit's parameters has no values now."""
        return any(it is param and it.data_ptr() == nan.data_ptr() for it, nan in self._poisoned)

    def restore(self, param: nn.Parameter, *, gathered: bool) -> None:
        """Points a parameter where it belongs: to the unit's buffer while that is `gathered`."""
        for it, value in self._gathered if gathered else self._poisoned:
            if it is param:
                it.data = value

    def reshard(self) -> None:
        """Detaches the parameters, before the buffer is reused for another unit."""
        for param, value in self._poisoned:
            param.data = value


WeightStore = ReplicatedWeights | ShardedWeights


def param_views(layout: UnitLayout, flat: Tensor) -> list[Tensor]:
    """Each parameter's part of a flat buffer, in its own shape."""
    return [
        flat[layout.param_range(index)].view(spec.shape) for index, spec in enumerate(layout.params)
    ]


def set_param_data(param: nn.Parameter, value: Tensor) -> None:
    """Makes `value` the parameter's data, keeping the Parameter object and its attributes.

    A parameter without memory gets another tensor's. Parameters with weak references (those of
    `nn.LSTM`) and with views, which stay on the meta device here, can, too.
    """
    if param.device.type == "meta" or param.dtype != value.dtype:
        real = nn.Parameter(value, requires_grad=param.requires_grad)
        swap_tensors(param, real)
    else:
        param.data = value


class WeightGather:
    """Gathers a run's sharded weights: uncompressed in this class, quantized or from a secondary
    partition in those of `compression`."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def gather_op(self, unit: ShardedWeights) -> GatherOp:
        """The operation that gathers a unit."""
        return self._collectives

    def invalidate(self) -> None:
        """Shards were updated: copies of gathered weights are stale."""

    @property
    def secondary_bytes(self) -> int:
        """Bytes of secondary shards (hpZ)."""
        return 0

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the payload buffers."""
        return 0
