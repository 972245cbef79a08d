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
from rayzero.engine.optim.local import Run
from rayzero.engine.zero.unit import Unit
from rayzero.engine.zero.weights import ShardedWeights


@dataclass(frozen=True)
class Part:
    """Elements `start` to `stop` of a flattened parameter, in the engine's own memory."""

    start: int
    stop: int
    memory: Tensor


@dataclass(frozen=True)
class Place:
    """A parameter's place: number `index` of a unit."""

    unit: Unit
    index: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.unit.layout.params[self.index].shape

    def main_weights(self) -> list[Part]:
        """What this rank updates of it; nothing if it is frozen."""
        if self.unit.main is None:
            return []
        return list(self._within(self.unit.owned, self.unit.main))

    def gradients(self) -> list[Part]:
        """This rank's part of the sum. It must have arrived."""
        if self.unit.grads is None:
            return []
        self.unit.grads.counted(
            self.unit.shard
        )  # where sums come to another memory, they are there
        return list(self._within(self.unit.owned, self.unit.grads.owned()))

    def optimizer_state(
        self, runs: Iterable[Run], state: dict[Tensor, dict[str, Tensor]], key: str
    ) -> list[Part]:
        """This rank's part of a tensor of optimizer state, as far as there is one yet."""
        parts: list[Part] = []
        for run in runs:
            value = state.get(run.weight, {}).get(key) if run.unit is self.unit else None
            if isinstance(value, Tensor) and value.ndim:
                parts += self._within(run.extent, value)
        return parts

    def model_weights(self) -> list[Part]:
        """This rank's shard of it; all of it where weights are replicated."""
        weights = self.unit.weights
        if isinstance(weights, ShardedWeights):
            return list(self._within(self.unit.shard, weights.shard))
        whole = slice(0, self.unit.layout.numel)
        return list(self._within(whole, weights.resting))

    def whole(
        self, parts: Sequence[Part], collectives: Collectives, like: Tensor, *, scattered: bool
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
                for piece in self.unit.layout.pieces(rank):
                    if piece.param == self.index:
                        collectives.broadcast(flat[piece.param_start : piece.param_stop], rank)
        return flat.view(self.shape)

    def _within(self, lies: slice, memory: Tensor) -> Iterator[Part]:
        """The part of it in `memory`, which lies at `lies` in the unit's flat layout."""
        extent = self.unit.layout.extent(self.index)
        start, stop = max(extent.start, lies.start), min(extent.stop, lies.stop)
        if start < stop:
            part = memory[start - lies.start : stop - lies.start]
            yield Part(start - extent.start, stop - extent.start, part)


def put(parts: Iterable[Part], value: Tensor) -> None:
    """Writes a whole tensor's values to parts of it."""
    flat = value.detach().reshape(-1)
    for part in parts:
        part.memory.copy_(flat[part.start : part.stop])


def put_changed(parts: Iterable[Part], value: Tensor, before: Tensor) -> None:
    """The same, but only elements that are not what they were before: the others may be known
    here to more digits than `value` has."""
    new, old = value.detach().reshape(-1), before.reshape(-1)
    for part in parts:
        mine = slice(part.start, part.stop)
        changed = (new[mine] != old[mine]).to(part.memory.device)
        values = new[mine].to(part.memory.device, part.memory.dtype)
        part.memory.copy_(torch.where(changed, values, part.memory))
