"""The optimizer of one rank: a torch optimizer over this rank's shards of the main weights.

Most optimizers are elementwise and need nothing but their shard; the others access whole
parameters through `whole_params`. A parameter group's part of a unit is contiguous in the unit's
flat buffer, hence one tensor. With offloaded state an update shards in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine.errors import ConfigError
from rayzero.engine.offload.stores import StateStore, UpdateChunk
from rayzero.engine.offload.transfer import MemoryKind
from rayzero.engine.optim.whole_params import NeedsWholeParams
from rayzero.engine.zero.unit import Unit

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
    """All shards of this rank, as views of the units' main weights and main grads."""
    shards = []
    for unit in units:
        if unit.main_weights is None or unit.grads is None:
            continue
        grads = unit.grads.owned()
        for group, whole in unit.layout.group_ranges(unit.owned):
            for part in _split_range(whole, unit.state_store.chunk_numel):
                layout_range = slice(unit.owned.start + part.start, unit.owned.start + part.stop)
                weight = nn.Parameter(unit.main_weights[part])
                shards.append(OptimizerShard(group, unit, layout_range, weight, grads[part]))
    return shards


def _split_range(part: slice, numel: int | None) -> Iterator[slice]:
    """Parts of at most `numel` elements, the chunks in which state is read from files."""
    step = numel or part.stop - part.start
    for start in range(part.start, part.stop, step):
        yield slice(start, min(start + step, part.stop))


class ShardedOptimizer:
    """Steps a torch optimizer whose parameters are this rank's shards.

    Attributes:
        torch_optimizer: the optimizer that learning-rate schedulers and users see.
        shards: what it updates.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, shards: Sequence[OptimizerShard]) -> None:
        self.torch_optimizer = optimizer
        self.shards = shards
        # torch's GradScaler contract: the optimizer divides gradients by `grad_scale`, a float32,
        # inside its kernel, which saves a pass over them.
        self._uses_grad_scale = bool(
            getattr(optimizer, "_step_supports_amp_scaling", False)
        ) and all(shard.weight.dtype is torch.float32 for shard in shards)

    def step(self, factor: float) -> None:
        """Update the main weights with `factor` times the main grads, which may be overwritten.

        Collective for optimizers that use whole parameters, local for all others.
        """
        for shards in self.chunks():
            self.step_shards(shards, factor)

    def chunks(self) -> Iterator[Sequence[OptimizerShard]]:
        """Yields the shards that are updated together, while their state is in memory."""
        yield self.shards

    def step_shards(self, shards: Sequence[OptimizerShard], factor: float) -> None:
        """Step the torch optimizer, whose parameters currently are these shards."""
        for shard in shards:
            # No copy, unless gradients are summed in another dtype.
            shard.weight.grad = shard.grad.to(shard.weight.dtype)
        if factor != 1.0:
            self._scale_grads(shards, factor)
        self.torch_optimizer.step()
        for shard in shards:
            shard.weight.grad = None
        if self._uses_grad_scale:
            self.torch_optimizer.grad_scale = None  # type: ignore[attr-defined]

    def reset_state(self) -> None:
        """Reset the optimizer state to that before the first step."""
        self.torch_optimizer.state.clear()
        self.torch_optimizer.state.update(initial_state(self.torch_optimizer))

    @property
    def lr(self) -> float:
        """The first group's learning rate."""
        return float(self.torch_optimizer.param_groups[0]["lr"])

    def _scale_grads(self, shards: Sequence[OptimizerShard], factor: float) -> None:
        if self._uses_grad_scale:
            device = shards[0].weight.device
            scale = torch.tensor(1.0 / factor, dtype=torch.float32, device=device)
            self.torch_optimizer.grad_scale = scale  # type: ignore[attr-defined]
        else:
            grads = [shard.weight.grad for shard in shards if shard.weight.grad is not None]
            torch._foreach_mul_(grads, factor)


def group_shards(
    shards: Sequence[OptimizerShard], options: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Parameter groups for a torch optimizer: the groups' options with this rank's shards."""
    return [
        {**option, "params": [shard.weight for shard in shards if shard.group == group]}
        for group, option in enumerate(options)
    ]


def check_elementwise(optimizer: object) -> None:
    """Refuse an optimizer of torch, or its class, that is known not to be elementwise.

    Raises:
        ConfigError: the update of shards would differ from that of whole parameters.
    """
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    if issubclass(cls, NeedsWholeParams):
        return
    if any(base.__name__ in _NOT_ELEMENTWISE for base in cls.__mro__):
        raise ConfigError(
            f"the optimizer {cls.__name__} does not update each element independently",
            allowed="optimizers such as AdamW, SGD, RMSprop or Adagrad, which shards can use; "
            '"optimizer": {"type": "Muon"} or {"type": "Lamb"} in the engine config',
            fix="initialize(optimizer=...)",
        )


def initial_state(optimizer: torch.optim.Optimizer) -> dict[Tensor, Any]:
    """The state before the first step: empty, except for Adagrad, which has state initially."""
    if not isinstance(optimizer, torch.optim.Adagrad):
        return {}
    groups = [dict(group) for group in optimizer.param_groups]
    return dict(type(optimizer)(groups, **optimizer.defaults).state)


def rebind_params(
    optimizer: torch.optim.Optimizer, shards: Sequence[OptimizerShard]
) -> torch.optim.Optimizer:
    """Put this rank's shards into the user's own optimizer, to which schedulers may already refer.

    Raises:
        ConfigError: the optimizer has taken steps.
    """
    if not _took_no_step(optimizer):
        raise ConfigError(
            f"the {type(optimizer).__name__} passed to initialize has already taken steps",
            allowed="a new optimizer",
            fix="create the optimizer just before calling initialize",
        )
    for group, options in enumerate(optimizer.param_groups):
        options["params"] = [shard.weight for shard in shards if shard.group == group]
    optimizer.state.clear()
    optimizer.state.update(initial_state(optimizer))
    return optimizer


def _took_no_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it has not stepped yet; Adagrad has state from the beginning."""
    if isinstance(optimizer, torch.optim.Adagrad):
        return all(float(state["step"]) == 0 for state in optimizer.state.values())
    return not optimizer.state


class ChunkedOptimizer(ShardedOptimizer):
    """Steps the torch optimizer once per chunk, with the chunk's shards as its only parameters.

    Everything on the device is one chunk and goes first: the GPU computes it while the CPU
    continues with the others.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, shards: Sequence[OptimizerShard]) -> None:
        super().__init__(optimizer, shards)
        stores = {id(shard.unit.state_store): shard.unit.state_store for shard in shards}.values()
        self._chunks_by_store = [
            (
                store,
                _group_shards(
                    store, [shard for shard in shards if shard.unit.state_store is store]
                ),
            )
            for store in sorted(stores, key=lambda it: it.memory_kind is not MemoryKind.DEVICE)
        ]

    def chunks(self) -> Iterator[Sequence[OptimizerShard]]:
        with self._restoring_params():
            for store, groups in self._chunks_by_store:
                chunks = [_make_chunk(shards) for shards in groups]
                for number in store.update_chunks(chunks, self.torch_optimizer.state):
                    self._restrict_params(groups[number])
                    yield groups[number]

    @contextmanager
    def _restoring_params(self) -> Iterator[None]:
        """Restore all parameters of the torch optimizer on exit."""
        all_params = [group["params"] for group in self.torch_optimizer.param_groups]
        try:
            yield
        finally:
            for group, params in zip(self.torch_optimizer.param_groups, all_params, strict=True):
                group["params"] = params

    def _restrict_params(self, shards: Sequence[OptimizerShard]) -> None:
        for number, group in enumerate(self.torch_optimizer.param_groups):
            group["params"] = [shard.weight for shard in shards if shard.group == number]


def choose_optimizer_class(shards: Sequence[OptimizerShard]) -> type[ShardedOptimizer]:
    """`ChunkedOptimizer` if any state is offloaded."""
    offloaded = any(shard.unit.state_store.memory_kind is not MemoryKind.DEVICE for shard in shards)
    return ChunkedOptimizer if offloaded else ShardedOptimizer


def _group_shards(
    store: StateStore, shards: Sequence[OptimizerShard]
) -> list[list[OptimizerShard]]:
    """Shards to update together: of one unit, and at most `store.chunk_numel` elements."""
    if store.memory_kind is MemoryKind.DEVICE:
        return [list(shards)]
    groups: list[list[OptimizerShard]] = []
    for _, unit in groupby(shards, key=lambda shard: id(shard.unit)):
        available = 0
        for number, shard in enumerate(unit):
            numel = shard.weight.numel()
            if not number or (store.chunk_numel is not None and numel > available):
                groups.append([])
                available = store.chunk_numel or 0
            groups[-1].append(shard)
            available -= numel
    return groups


def _make_chunk(shards: Sequence[OptimizerShard]) -> UpdateChunk:
    main = shards[0].unit.main_weights
    if main is None:
        raise RuntimeError("a frozen unit has no optimizer shards")
    return UpdateChunk(
        main,
        tuple(shard.weight for shard in shards),
        tuple(_model_weight_range(shard) for shard in shards),
    )


def _model_weight_range(shard: OptimizerShard) -> Tensor:
    """The model weights updated from a shard of main weights."""
    unit = shard.unit
    start = unit.owned.start
    return unit.weights.owned_range(unit.owned)[
        shard.layout_range.start - start : shard.layout_range.stop - start
    ]
