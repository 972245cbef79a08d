"""The optimizer of one rank: a torch optimizer over this rank's shards of the main weights.

Most optimizers are elementwise and need only their shard. The others access whole parameters
through `whole_params`. A parameter group's part of a unit is contiguous in the unit's flat buffer,
hence one tensor. Shards are updated in chunks: those on the device all at once, offloaded ones as
their store brings them into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.errors import ConfigError
from rayzero.engine.offload.stores import StateStore, UpdateChunk
from rayzero.engine.offload.transfer import MemoryKind
from rayzero.engine.optim.adafactor import is_adafactor
from rayzero.engine.optim.whole_params import NeedsWholeParams, ShardedWholeParamOps
from rayzero.engine.zero.unit import Unit
from rayzero.engine.zero.unused_params import UnusedRanges

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

# Optimizers of torch that use a parameter's shape, or all parameters at once.
_NOT_ELEMENTWISE = {"LBFGS", "Muon", "Adafactor", "SparseAdam"}


@dataclass(frozen=True)
class OptimizerShard:
    """One parameter group's part of one unit's main weights on this rank, and its gradient.

    `layout_range` is its position in the unit's flat layout.
    """

    group: int
    unit: Unit
    layout_range: slice
    weight: nn.Parameter
    grad: Tensor


def optimizer_shards(units: Sequence[Unit]) -> list[OptimizerShard]:
    """Returns all shards of this rank, as views of the units' main weights and main grads. State in
    files is read in chunks, into which its shards are cut."""
    shards = []
    for unit in units:
        if unit.main_weights is None or unit.grads is None:
            continue
        grads = unit.grads.owned()
        for group, extent in unit.layout.group_ranges(unit.owned):
            step = unit.state_store.chunk_numel or extent.stop - extent.start
            for start in range(extent.start, extent.stop, step):
                part = slice(start, min(start + step, extent.stop))
                layout_range = slice(unit.owned.start + start, unit.owned.start + part.stop)
                weight = nn.Parameter(unit.main_weights[part])
                shards.append(OptimizerShard(group, unit, layout_range, weight, grads[part]))
    return shards


class ShardedOptimizer:
    """Steps a torch optimizer whose parameters are this rank's shards.

    Attributes:
        torch_optimizer: the optimizer that learning-rate schedulers and users see.
        shards: the shards that the torch optimizer updates.
        resets_other_state: a saved state of another optimizer is ignored instead of refused.
        update_dtype: the dtype of updates and of optimizer state. None for the main weights' dtype.
            While a chunk is updated, its weights are copies in that dtype.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shards: Sequence[OptimizerShard],
        update_dtype: torch.dtype | None = None,
    ) -> None:
        self.torch_optimizer = optimizer
        self.update_dtype = update_dtype
        self.resets_other_state = False
        self._set_shards(shards)

    def rebind(self, shards: Sequence[OptimizerShard]) -> None:
        """Updates these shards from now on. The torch optimizer's state and the options of its
        parameter groups do not change."""
        self._set_params(shards)
        self._set_shards(shards)

    def bind_whole_params(self, units: Sequence[Unit], collectives: Collectives) -> None:
        """Gives the torch optimizer access to the whole parameters of all units, if it needs that.
        Raises what the optimizer's `bind_whole_params` raises."""
        if isinstance(self.torch_optimizer, NeedsWholeParams):
            shards: dict[Tensor, tuple[Unit, slice]] = {
                shard.weight: (shard.unit, shard.layout_range) for shard in self.shards
            }
            self.torch_optimizer.bind_whole_params(ShardedWholeParamOps(units, shards, collectives))

    def _set_params(self, shards: Sequence[OptimizerShard]) -> None:
        """Makes the shards' weights the torch optimizer's only parameters."""
        for number, group in enumerate(self.torch_optimizer.param_groups):
            group["params"] = [shard.weight for shard in shards if shard.group == number]

    def _set_shards(self, shards: Sequence[OptimizerShard]) -> None:
        self.shards = shards
        # torch's GradScaler contract: the optimizer divides gradients by `grad_scale`, a float32,
        # inside its kernel, which saves a pass over them.
        self._uses_grad_scale = bool(
            getattr(self.torch_optimizer, "_step_supports_amp_scaling", False)
        ) and all(self.state_dtype(shard) is torch.float32 for shard in shards)
        # The device first: the GPU computes its chunk while the CPU continues with the others.
        stores = {id(shard.unit.state_store): shard.unit.state_store for shard in shards}.values()
        self._chunks_by_store = [
            (store, _make_chunks(store, shards))
            for store in sorted(stores, key=lambda store: store.memory_kind != MemoryKind.DEVICE)
        ]

    def step(self, factor: float, unused: UnusedRanges = MappingProxyType({})) -> None:
        """Update the main weights with `factor` times the main grads, which may be overwritten.

        Steps the torch optimizer once per chunk, with the chunk's shards as its only parameters.
        Collective for optimizers that use whole parameters, local for all others. Weights and state
        of `unused` ranges, whose gradients are zero, do not change.
        """
        with closing(self.chunks()) as chunks:
            for shards in chunks:
                affected = [shard for shard in shards if shard.unit.name in unused]
                with self._unchanged(affected, unused):
                    self._step_shards(shards, factor)

    @contextmanager
    def _unchanged(self, shards: Sequence[OptimizerShard], unused: UnusedRanges) -> Iterator[None]:
        """Encloses an update. Copies weights and state of the `unused` ranges before it, and
        restores them afterwards. State that does not exist yet is made by the update from a weight
        and a gradient of zero, and so is the state with which an optimizer begins."""
        kept: list[tuple[OptimizerShard, slice, Tensor, dict[str, Tensor]]] = []
        for shard in shards:
            begin, state = shard.layout_range.start, self.state_tensors(shard)
            for extent in unused[shard.unit.name]:
                numel = shard.weight.numel()
                part = slice(max(0, extent.start - begin), min(numel, extent.stop - begin))
                if part.start < part.stop:
                    weights = shard.weight.data[part]
                    states = {key: tensor[part].clone() for key, tensor in state.items()}
                    kept.append((shard, part, weights.clone(), states))
                    weights.zero_()
        yield
        for shard, part, values, states in kept:
            shard.weight.data[part] = values
            state = self.state_tensors(shard)  # the update may have replaced tensors
            for key, value in states.items():
                state[key][part] = value

    def chunks(self) -> Generator[Sequence[OptimizerShard], None, None]:
        """Yields the shards that are updated together, while their state is in memory and they are
        the torch optimizer's only parameters."""
        all_params = [group["params"] for group in self.torch_optimizer.param_groups]
        try:
            for store, chunks in self._chunks_by_store:
                updates = [update for update, _ in chunks]
                for number in store.update_chunks(updates, self.torch_optimizer.state):
                    _, shards = chunks[number]
                    self._set_params(shards)
                    yield shards
        finally:
            for group, params in zip(self.torch_optimizer.param_groups, all_params, strict=True):
                group["params"] = params

    def _step_shards(self, shards: Sequence[OptimizerShard], factor: float) -> None:
        """Step the torch optimizer, whose parameters currently are these shards."""
        main_weights = [shard.weight.data for shard in shards]
        for shard in shards:
            # No copies, unless weights are updated, or gradients summed, in another dtype.
            dtype = self.state_dtype(shard)
            shard.weight.data = shard.weight.data.to(dtype)
            shard.weight.grad = shard.grad.to(dtype)
        if factor != 1.0 and self._uses_grad_scale:
            device = shards[0].weight.device
            scale = torch.full((), 1.0 / factor, dtype=torch.float32, device=device)  # no copy
            self.torch_optimizer.grad_scale = scale  # type: ignore[attr-defined]
        elif factor != 1.0:
            grads = [shard.weight.grad for shard in shards if shard.weight.grad is not None]
            torch._foreach_mul_(grads, factor)
        try:
            self.torch_optimizer.step()
            for shard, main in zip(shards, main_weights, strict=True):
                if shard.weight.dtype is not main.dtype:
                    main.copy_(shard.weight.data)
        finally:
            for shard, main in zip(shards, main_weights, strict=True):
                shard.weight.data, shard.weight.grad = main, None
        if self._uses_grad_scale:
            self.torch_optimizer.grad_scale = None  # type: ignore[attr-defined]

    def state_dtype(self, shard: OptimizerShard) -> torch.dtype:
        """Returns the dtype of a shard's updates and of its floating-point optimizer state."""
        return self.update_dtype or shard.weight.dtype

    def state_tensors(self, shard: OptimizerShard) -> dict[str, Tensor]:
        """Returns a shard's optimizer state by key, without scalars. Empty before step 1."""
        state = self.torch_optimizer.state.get(shard.weight, {})
        return {
            key: value for key, value in state.items() if isinstance(value, Tensor) and value.ndim
        }

    def replicated_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) of state that is equal on all ranks and belongs to no element."""
        if hasattr(self.torch_optimizer, "replicated_state"):
            yield from self.torch_optimizer.replicated_state()

    @property
    def lr(self) -> float:
        """The first group's learning rate; 0 if the optimizer sets its own (Adafactor's
        `relative_step`)."""
        return float(self.torch_optimizer.param_groups[0]["lr"] or 0.0)


def group_shards(
    shards: Sequence[OptimizerShard], options: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns parameter groups for a torch optimizer: the options, and this rank's shards."""
    return [
        {**option, "params": [shard.weight for shard in shards if shard.group == group]}
        for group, option in enumerate(options)
    ]


def check_elementwise(optimizer: object) -> None:
    """Raises ConfigError if a torch optimizer, or its class, is known not to be elementwise. Its
    update of shards would differ from that of whole parameters."""
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    if issubclass(cls, NeedsWholeParams) or is_adafactor(cls):
        return
    if any(base.__name__ in _NOT_ELEMENTWISE for base in cls.__mro__):
        raise ConfigError(
            f"the optimizer {cls.__name__} does not update each element independently",
            allowed="optimizers such as AdamW, SGD, RMSprop or Adagrad, which shards can use; "
            '"optimizer": {"type": "Muon"} or {"type": "Lamb"} in the engine config, or '
            "transformers.Adafactor",
            fix="initialize(optimizer=...)",
        )


def rebind_params(
    optimizer: torch.optim.Optimizer, shards: Sequence[OptimizerShard]
) -> torch.optim.Optimizer:
    """Put this rank's shards into the user's own optimizer, to which schedulers may already refer.
    Raises ConfigError if the optimizer has taken steps."""
    # Adagrad has state before its first step, with a step count of 0.
    if any(float(state.get("step", 1)) for state in optimizer.state.values()):
        raise ConfigError(
            f"the {type(optimizer).__name__} passed to initialize has already taken steps",
            allowed="a new optimizer",
            fix="create the optimizer just before calling initialize",
        )
    for group, options in enumerate(optimizer.param_groups):
        options["params"] = [shard.weight for shard in shards if shard.group == group]
    reset_state(optimizer)
    return optimizer


def reset_state(optimizer: torch.optim.Optimizer) -> None:
    """Resets the optimizer to its state before the first step."""
    optimizer.state.clear()
    if isinstance(optimizer, torch.optim.Adagrad):  # the only one with state before its first step
        groups = [dict(group) for group in optimizer.param_groups]
        optimizer.state.update(type(optimizer)(groups, **optimizer.defaults).state)


def _make_chunks(
    store: StateStore, shards: Sequence[OptimizerShard]
) -> list[tuple[UpdateChunk, list[OptimizerShard]]]:
    """Returns the chunks of a store's shards. On the device, all shards are one chunk. Elsewhere, a
    chunk is of one unit and has at most `store.chunk_numel` elements."""
    stored = [shard for shard in shards if shard.unit.state_store is store]
    if store.memory_kind is MemoryKind.DEVICE:
        return [(_make_chunk(stored), stored)]
    groups: list[list[OptimizerShard]] = []
    for _, unit in groupby(stored, key=lambda shard: id(shard.unit)):
        available = 0
        for number, shard in enumerate(unit):
            numel = shard.weight.numel()
            if not number or (store.chunk_numel is not None and numel > available):
                groups.append([])
                available = store.chunk_numel or 0
            groups[-1].append(shard)
            available -= numel
    return [(_make_chunk(group), group) for group in groups]


def _make_chunk(shards: Sequence[OptimizerShard]) -> UpdateChunk:
    main = shards[0].unit.main_weights
    if main is None:
        raise RuntimeError("a frozen unit has no optimizer shards")
    targets = []
    for shard in shards:
        owned, extent = shard.unit.owned, shard.layout_range
        model_weights = shard.unit.weights.owned_range(owned)
        targets.append(model_weights[extent.start - owned.start : extent.stop - owned.start])
    return UpdateChunk(main, tuple(shard.weight for shard in shards), tuple(targets))
