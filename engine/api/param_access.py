"""Reads and writes the full tensors of one parameter, which are distributed over the ranks: model
weights, main weights, gradients, optimizer state. For inspection and manual changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.optim.sharded_optimizer import OptimizerShard
from rayzero.engine.zero.parameters import ShardedWeights
from rayzero.engine.zero.unit import Unit


@dataclass(frozen=True)
class ParamSlice:
    """Elements `start` to `stop` of a flattened parameter, in the engine's own memory."""

    start: int
    stop: int
    memory: Tensor


@dataclass(frozen=True)
class ParamLocation:
    """A parameter by its unit and its index in it."""

    unit: Unit
    index: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.unit.layout.params[self.index].shape

    def main_weights(self) -> list[ParamSlice]:
        """The part that this rank updates; empty if frozen."""
        if self.unit.main_weights is None:
            return []
        return list(self._slices_within(self.unit.owned, self.unit.main_weights))

    def gradients(self) -> list[ParamSlice]:
        """This rank's part of the reduced gradient. The reduction must have been waited for."""
        if self.unit.grads is None:
            return []
        return list(self._slices_within(self.unit.owned, self.unit.grads.owned()))

    def optimizer_state(
        self, shards: Iterable[OptimizerShard], state: dict[Tensor, dict[str, Tensor]], key: str
    ) -> list[ParamSlice]:
        """This rank's part of a tensor of optimizer state; empty before the first step."""
        parts: list[ParamSlice] = []
        for shard in shards:
            value = state.get(shard.weight, {}).get(key) if shard.unit is self.unit else None
            if isinstance(value, Tensor) and value.ndim:
                parts += self._slices_within(shard.layout_range, value)
        return parts

    def model_weights(self) -> list[ParamSlice]:
        """This rank's shard; the full parameter where weights are replicated."""
        weights = self.unit.weights
        if isinstance(weights, ShardedWeights):
            return list(self._slices_within(self.unit.shard, weights.shard))
        whole = slice(0, self.unit.layout.numel)
        return list(self._slices_within(whole, weights.persistent_tensor))

    def gather_full(
        self,
        parts: Sequence[ParamSlice],
        collectives: Collectives,
        like: Tensor,
        *,
        sharded: bool,
    ) -> Tensor:
        """The full tensor, in the parameter's shape, on every rank.

        Collective if `sharded`: then `parts` is this rank's shard only.

        Args:
            like: has the dtype and device of the result.
        """
        flat = like.new_zeros(self.unit.layout.params[self.index].numel)
        for part in parts:
            flat[part.start : part.stop].copy_(part.memory)
        if sharded:
            for rank in range(collectives.world_size):
                for span in self.unit.layout.ranges_in_shard(rank):
                    if span.param == self.index:
                        collectives.broadcast(flat[span.param_start : span.param_stop], rank)
        return flat.view(self.shape)

    def _slices_within(self, held: slice, memory: Tensor) -> Iterator[ParamSlice]:
        """The part in `memory`, which is the range `held` of the unit's flat layout."""
        extent = self.unit.layout.param_range(self.index)
        start, stop = max(extent.start, held.start), min(extent.stop, held.stop)
        if start < stop:
            part = memory[start - held.start : stop - held.start]
            yield ParamSlice(start - extent.start, stop - extent.start, part)


def write_slices(parts: Iterable[ParamSlice], value: Tensor) -> None:
    """Writes a full tensor's values to its parts."""
    flat = value.detach().reshape(-1)
    for part in parts:
        part.memory.copy_(flat[part.start : part.stop])


def write_changed_slices(parts: Iterable[ParamSlice], value: Tensor, before: Tensor) -> None:
    """Writes only elements that differ from `before`: the others may be stored with more precision
    than `value` has."""
    new, old = value.detach().reshape(-1), before.reshape(-1)
    for part in parts:
        mine = slice(part.start, part.stop)
        changed = (new[mine] != old[mine]).to(part.memory.device)
        values = new[mine].to(part.memory.device, part.memory.dtype)
        part.memory.copy_(torch.where(changed, values, part.memory))
