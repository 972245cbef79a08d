"""One parameter's whole tensors, put together of the ranks' parts, and written back to them.

For looking into a run and for changing it by hand, a parameter at a time: weights of the model,
main weights, gradients, optimizer state.
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
    """A parameter's place: number `index` of a unit."""

    unit: Unit
    index: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.unit.layout.params[self.index].shape

    def main_weights(self) -> list[ParamSlice]:
        """What this rank updates of it; nothing if it is frozen."""
        if self.unit.main_weights is None:
            return []
        return list(self._slices_within(self.unit.owned, self.unit.main_weights))

    def gradients(self) -> list[ParamSlice]:
        """This rank's part of the sum. It must have arrived."""
        if self.unit.grads is None:
            return []
        self.unit.grads.norm_part(
            self.unit.shard
        )  # where sums come to another memory, they are there
        return list(self._slices_within(self.unit.owned, self.unit.grads.owned()))

    def optimizer_state(
        self, runs: Iterable[OptimizerShard], state: dict[Tensor, dict[str, Tensor]], key: str
    ) -> list[ParamSlice]:
        """This rank's part of a tensor of optimizer state, as far as there is one yet."""
        parts: list[ParamSlice] = []
        for run in runs:
            value = state.get(run.weight, {}).get(key) if run.unit is self.unit else None
            if isinstance(value, Tensor) and value.ndim:
                parts += self._slices_within(run.layout_range, value)
        return parts

    def model_weights(self) -> list[ParamSlice]:
        """This rank's shard of it; all of it where weights are replicated."""
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
        scattered: bool,
    ) -> Tensor:
        """The whole tensor, in the parameter's shape, on every rank.

        Collective, if `scattered`: each rank has the part in its shard, not everything.

        Args:
            like: has the dtype and the device of what is made.
        """
        flat = like.new_zeros(self.unit.layout.params[self.index].numel)
        for part in parts:
            flat[part.start : part.stop].copy_(part.memory)
        if scattered:
            for rank in range(collectives.world_size):
                for piece in self.unit.layout.ranges_in_shard(rank):
                    if piece.param == self.index:
                        collectives.broadcast(flat[piece.param_start : piece.param_stop], rank)
        return flat.view(self.shape)

    def _slices_within(self, lies: slice, memory: Tensor) -> Iterator[ParamSlice]:
        """The part of it in `memory`, which lies at `lies` in the unit's flat layout."""
        extent = self.unit.layout.param_range(self.index)
        start, stop = max(extent.start, lies.start), min(extent.stop, lies.stop)
        if start < stop:
            part = memory[start - lies.start : stop - lies.start]
            yield ParamSlice(start - extent.start, stop - extent.start, part)


def write_slices(parts: Iterable[ParamSlice], value: Tensor) -> None:
    """Writes a whole tensor's values to parts of it."""
    flat = value.detach().reshape(-1)
    for part in parts:
        part.memory.copy_(flat[part.start : part.stop])


def write_changed_slices(parts: Iterable[ParamSlice], value: Tensor, before: Tensor) -> None:
    """The same, but only elements that are not what they were before: the others may be known
    here to more digits than `value` has."""
    new, old = value.detach().reshape(-1), before.reshape(-1)
    for part in parts:
        mine = slice(part.start, part.stop)
        changed = (new[mine] != old[mine]).to(part.memory.device)
        values = new[mine].to(part.memory.device, part.memory.dtype)
        part.memory.copy_(torch.where(changed, values, part.memory))
