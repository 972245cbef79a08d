"""Reads and writes the full tensors of one parameter, which are distributed over the ranks: model
weights, main weights, gradients, optimizer state. For inspection and manual changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rayzero.engine.engine import Engine, find_engine
from rayzero.engine.errors import EngineError
from rayzero.engine.zero.gather_buffers import BlockState
from rayzero.engine.zero.parameters import ShardedWeights
from rayzero.engine.zero.placement import Placement
from rayzero.engine.zero.unit import Unit


@dataclass(frozen=True)
class ParamSlice:
    """Elements `start` to `stop` of a flattened parameter, in the engine's own memory."""

    start: int
    stop: int
    memory: Tensor


@dataclass(frozen=True)
class StoredParam:
    """A parameter that an engine stores: its unit, and its index in the unit."""

    engine: Engine
    unit: Unit
    index: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.unit.layout.params[self.index].shape

    @property
    def grad_scale(self) -> float:
        """The factor by which a reduced gradient has yet to be multiplied."""
        return self.engine.settings.post_reduce_scale / self.engine.loss_scale

    def model_weights(self) -> list[ParamSlice]:
        """Returns this rank's shard; the full parameter where weights are replicated."""
        weights = self.unit.weights
        if isinstance(weights, ShardedWeights):
            return list(self._slices_within(self.unit.shard, weights.shard))
        whole = slice(0, self.unit.layout.numel)
        return list(self._slices_within(whole, weights.persistent_tensor))

    def main_weights(self) -> list[ParamSlice]:
        """Returns the part of the main weights that this rank updates; empty if the parameter is
        frozen."""
        if self.unit.main_weights is None:
            return []
        self.engine.state.before_write()  # the caller may change them
        return list(self._slices_within(self.unit.owned, self.unit.main_weights))

    def gradients(self) -> list[ParamSlice]:
        """Returns this rank's part of the reduced gradient; empty if the parameter is frozen.
        Raises EngineError while the gradient is not reduced: after `step`, and at stages 0 and 1
        before the last backward of a step."""
        step = self.engine.internals
        if self.unit.grads is None:
            return []
        if not step.tracker.has_gradients or self.unit.grads.local(self.index) is not None:
            raise EngineError(
                "a gradient was requested before it was reduced over the ranks",
                allowed="between the last backward() of a step and step()",
            )
        step.runtime.reducer.wait()
        return list(self._slices_within(self.unit.owned, self.unit.grads.owned()))

    @torch.no_grad()
    def local_gradient(self) -> Tensor | None:
        """Returns a copy of this rank's own gradient, scaled as if every rank had the same; None
        where gradients are already reduced."""
        local = None if self.unit.grads is None else self.unit.grads.local(self.index)
        if local is None:
            return None
        ranks = self.engine.world_size / self.engine.settings.gradient_factor
        return local.view(self.shape) * (self.grad_scale * ranks)

    def optimizer_state(self, key: str) -> list[ParamSlice]:
        """Returns this rank's part of a tensor of optimizer state; empty before the first step."""
        self.engine.state.before_write()
        optimizer = self.engine.internals.optimizer
        parts: list[ParamSlice] = []
        for shard in optimizer.shards:
            if shard.unit is self.unit:
                value = optimizer.state_tensors(shard).get(key)
                if value is not None:
                    parts += self._slices_within(shard.layout_range, value)
        return parts

    @torch.no_grad()
    def gather_model_weights(self, dtype: torch.dtype) -> Tensor:
        """Returns a copy of the full parameter on every rank. Collective where weights are
        sharded."""
        sharded = isinstance(self.unit.weights, ShardedWeights)
        return self._gather(self.model_weights(), dtype, sharded=sharded)

    @torch.no_grad()
    def gather_state(self, parts: Sequence[ParamSlice]) -> Tensor:
        """Returns the full tensor on every rank; `parts` are this rank's parts of it. Collective
        where the optimizer's state is sharded."""
        like = parts[0].memory if parts else self.unit.main_weights
        dtype = torch.float32 if like is None else like.dtype
        stage = self.engine.internals.runtime.stage
        return self._gather(parts, dtype, sharded=stage.optimizer_state is Placement.SHARDED)

    def _gather(self, parts: Sequence[ParamSlice], dtype: torch.dtype, *, sharded: bool) -> Tensor:
        """Returns the full tensor on the engine's device, in the parameter's shape; `parts` may be
        in any memory."""
        numel = self.unit.layout.params[self.index].numel
        flat = torch.zeros(numel, dtype=dtype, device=self.engine.device)
        for part in parts:
            flat[part.start : part.stop].copy_(part.memory)
        collectives = self.engine.internals.runtime.collectives
        for rank in range(collectives.world_size) if sharded else ():
            for held in self.unit.layout.overlaps(self.unit.layout.shard(rank)):
                if held.index == self.index:
                    collectives.broadcast(flat[held.start : held.stop], rank)
        return flat.view(self.shape)

    def _slices_within(self, held: slice, memory: Tensor) -> Iterator[ParamSlice]:
        """Yields the parameter's slice in `memory`, which is the range `held` of the unit's flat
        layout."""
        for part in self.unit.layout.overlaps(held):
            if part.index == self.index:
                yield ParamSlice(part.start, part.stop, memory[part.memory])


def find_owner(param: nn.Parameter) -> tuple[Engine, StoredParam | None] | None:
    """Returns the newest engine that has this parameter, and where the engine stores it: None for a
    frozen parameter that every rank holds in full. Returns None if no engine has the parameter."""
    if (found := find_engine(param)) is None:
        return None
    engine, entry = found
    return engine, None if entry is None else StoredParam(engine, *entry)


def invalidate_gathered(engine: Engine) -> None:
    """Makes the engine gather model weights again before their next use; call it after changing
    them."""
    engine.internals.runtime.unshard_scheduler.invalidate()


def restore_param(engine: Engine, stored: StoredParam, param: nn.Parameter) -> bool:
    """Points a parameter that a script has gathered back to the engine's memory. Does nothing and
    returns False where weights are replicated: such a parameter always has its own memory."""
    weights = stored.unit.weights
    if not isinstance(weights, ShardedWeights):
        return False
    state = engine.internals.runtime.unshard_scheduler.state_of(weights)
    weights.restore(param, gathered=state is not BlockState.SHARDED)
    return True


def write_slices(parts: Iterable[ParamSlice], value: Tensor) -> None:
    """Writes a full tensor's values to its parts."""
    flat = value.detach().reshape(-1)
    for part in parts:
        part.memory.copy_(flat[part.start : part.stop])


def write_changed_slices(parts: Iterable[ParamSlice], value: Tensor, before: Tensor) -> None:
    """Writes only the elements of `value` that differ from `before`: `parts` may hold the others in
    a higher precision than `value` has."""
    new, old = value.detach().reshape(-1), before.reshape(-1)
    for part in parts:
        mine = slice(part.start, part.stop)
        changed = (new[mine] != old[mine]).to(part.memory.device)
        values = new[mine].to(part.memory.device, part.memory.dtype)
        part.memory.copy_(torch.where(changed, values, part.memory))
