"""Weight stores: one unit's model weights, replicated or sharded.

The model's parameters are views of one flat buffer while they are in use. Their addresses must not
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
    """Replicated weights: the parameters are always views of the flat buffer."""

    memory_kind = MemoryKind.DEVICE

    def __init__(self, layout: UnitLayout, params: tuple[nn.Parameter, ...], flat: Tensor) -> None:
        self.persistent_tensor = flat
        self._own: Tensor | None = None
        for param, view in zip(params, param_views(layout, flat), strict=True):
            set_param_data(param, view)

    def owned_range(self, owned: slice) -> Tensor:
        """Returns the range of model weights whose main weights this rank updates."""
        return self.persistent_tensor[owned]

    def gather_updates(self, collectives: Collectives) -> Work:
        """Starts to gather the parts that the other ranks have updated."""
        full = self.persistent_tensor
        if self._own is None:
            self._own = rank_chunk(full, collectives.rank, collectives.world_size)
        return collectives.all_gather(full, self._own)


class ShardedWeights:
    """Sharded weights: the parameters have values only while the unit is gathered.

    Otherwise a parameter keeps its shape but reads as NaN, so that a weight used outside its
    block's forward is noticed at once instead of giving stale values. `shard_gather`, which all
    units of a run share, gathers shards that are in host memory or a file. None if shards are on
    the device.
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
        # Packed quantized values: only their bits have a meaning.
        self.packed = not shard.is_floating_point() or is_packed(params[0])
        self._gathered: list[tuple[nn.Parameter, Tensor]] = []  # as of the last `unshard`
        self._buffer: Tensor | None = None  # the buffer of `_gathered`
        self._full = shard  # the unit's part of `_buffer`

    def owned_range(self, owned: slice) -> Tensor:
        """Returns the range of model weights whose main weights this rank updates: its shard."""
        return self.shard

    def unshard(self, buffer: Tensor, gather_op: GatherOp) -> Work:
        """Starts to gather the unit into `buffer`, and makes the parameters views of it. The buffer
        has at least `layout.numel` elements. No kernel enqueued later may read its old values."""
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
        """Returns a new buffer of zeros to gather into."""
        if self._shard_gather is None:
            return self.shard.new_zeros(numel)
        return self._shard_gather.new_buffer(numel, self.shard.dtype)

    def is_poisoned(self, param: nn.Parameter) -> bool:
        """Returns whether `param` is one of the unit's parameters and reads as NaN now."""
        return any(
            own is param and own.data_ptr() == value.data_ptr() for own, value in self._poisoned
        )

    def restore(self, param: nn.Parameter, *, gathered: bool) -> None:
        """Makes a parameter a view of the unit's buffer if the unit is `gathered`, else NaN."""
        for own, value in self._gathered if gathered else self._poisoned:
            if own is param:
                own.data = value

    def reshard(self) -> None:
        """Makes the parameters NaN, before the buffer is reused for another unit."""
        for param, value in self._poisoned:
            param.data = value


WeightStore = ReplicatedWeights | ShardedWeights


def param_views(layout: UnitLayout, flat: Tensor) -> list[Tensor]:
    """Returns each parameter's part of a flat buffer, in the parameter's shape."""
    return [
        flat[layout.param_range(index)].view(spec.shape) for index, spec in enumerate(layout.params)
    ]


def set_param_data(param: nn.Parameter, value: Tensor) -> None:
    """Makes `value` the parameter's data, keeping the Parameter object and its attributes.

    A parameter on the meta device gets the memory of `value`, even if weak references to it exist
    (as in `nn.LSTM`), or views of it. The views stay on the meta device.
    """
    if param.device.type == "meta" or param.dtype != value.dtype:
        real = nn.Parameter(value, requires_grad=param.requires_grad)
        swap_tensors(param, real)
    else:
        param.data = value


class WeightGather:
    """Chooses how a run's sharded weights are gathered. This class gathers them uncompressed,
    subclasses in `compression` quantized or from a secondary partition."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def gather_op(self, unit: ShardedWeights) -> GatherOp:
        """Returns the operation that gathers a unit."""
        return self._collectives

    def invalidate(self) -> None:
        """Called after shards were updated. Discards copies of weights, which are now stale."""

    @property
    def secondary_bytes(self) -> int:
        """Bytes of secondary shards (hpZ)."""
        return 0

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the payload buffers."""
        return 0
