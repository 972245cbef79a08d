"""Torch optimizer over shards; chunked variant for offload.

The optimizer of one rank: a torch optimizer over this rank's parts of the main weights.

Most optimizers work element by element, so a shard needs to know nothing of its neighbours; the
others are told of whole parameters (`whole`). A parameter group's part of a unit is one run of the
unit's flat buffer, hence one tensor.

The local optimizer where state rests elsewhere: an update goes piece by piece.
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

# Of torch's own: those that look at a parameter's shape, or at all parameters at once.
_NOT_ELEMENTWISE = {"LBFGS", "Muon", "Adafactor", "SparseAdam"}


@dataclass(frozen=True)
class OptimizerShard:
    """One parameter group's part of one unit's main weights on this rank, and its gradient.

    `extent` is where it lies in the unit's flat layout.
    """

    group: int
    unit: Unit
    layout_range: slice
    weight: nn.Parameter
    grad: Tensor


def optimizer_shards(units: Sequence[Unit]) -> list[OptimizerShard]:
    """All runs of this rank, as views of the units' main weights and main grads."""
    runs = []
    for unit in units:
        if unit.main_weights is None or unit.grads is None:
            continue
        grads = unit.grads.owned()
        for group, whole in unit.layout.group_ranges(unit.owned):
            for part in _split_range(whole, unit.state_store.chunk_numel):
                extent = slice(unit.owned.start + part.start, unit.owned.start + part.stop)
                runs.append(
                    OptimizerShard(
                        group, unit, extent, nn.Parameter(unit.main_weights[part]), grads[part]
                    )
                )
    return runs


def _split_range(part: slice, numel: int | None) -> Iterator[slice]:
    """Parts of at most `numel` elements: state that rests in a file comes by such pieces."""
    step = numel or part.stop - part.start
    for start in range(part.start, part.stop, step):
        yield slice(start, min(start + step, part.stop))


class ShardedOptimizer:
    """Steps a torch optimizer whose parameters are this rank's runs.

    Attributes:
        torch: the torch optimizer, which learning-rate schedulers and users see.
        runs: what it updates.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, runs: Sequence[OptimizerShard]) -> None:
        self.torch_optimizer = optimizer
        self.shards = runs
        # The contract torch's own GradScaler uses: such an optimizer divides gradients by
        # `grad_scale` inside its kernel, which spares a pass over them. The scale is a float32.
        self._uses_grad_scale = bool(
            getattr(optimizer, "_step_supports_amp_scaling", False)
        ) and all(run.weight.dtype is torch.float32 for run in runs)

    def step(self, factor: float) -> None:
        """Updates the main weights with `factor` times the main grads, which it may overwrite.

        Collective for optimizers that look at whole parameters, local for all others.
        """
        self.step_shards(self.shards, factor)

    def step_shards(self, runs: Sequence[OptimizerShard], factor: float) -> None:
        """Steps the torch optimizer, whose parameters at the moment are these runs."""
        for run in runs:
            # The same tensor, unless gradients are summed in another dtype.
            run.weight.grad = run.grad.to(run.weight.dtype)
        if factor != 1.0:
            self._scale_grads(runs, factor)
        self.torch_optimizer.step()
        for run in runs:
            run.weight.grad = None
        if self._uses_grad_scale:
            self.torch_optimizer.grad_scale = None  # type: ignore[attr-defined]

    def reset_state(self) -> None:
        """The state is what it is before the first step."""
        self.torch_optimizer.state.clear()
        self.torch_optimizer.state.update(initial_state(self.torch_optimizer))

    @property
    def lr(self) -> float:
        """The first group's learning rate."""
        return float(self.torch_optimizer.param_groups[0]["lr"])

    def _scale_grads(self, runs: Sequence[OptimizerShard], factor: float) -> None:
        if self._uses_grad_scale:
            device = runs[0].weight.device
            scale = torch.tensor(1.0 / factor, dtype=torch.float32, device=device)
            self.torch_optimizer.grad_scale = scale  # type: ignore[attr-defined]
        else:
            grads = [run.weight.grad for run in runs if run.weight.grad is not None]
            torch._foreach_mul_(grads, factor)


def group_shards(
    runs: Sequence[OptimizerShard], options: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Parameter groups for a torch optimizer: each group's options, with this rank's runs."""
    return [
        {**option, "params": [run.weight for run in runs if run.group == group]}
        for group, option in enumerate(options)
    ]


def check_elementwise(optimizer: object) -> None:
    """Refuses an optimizer, or its class, of torch's that does not work element by element.

    Raises:
        ConfigError: shards of parameters would not be updated as whole parameters are.
    """
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    if issubclass(cls, NeedsWholeParams):
        return
    if any(base.__name__ in _NOT_ELEMENTWISE for base in cls.__mro__):
        raise ConfigError(
            f"the optimizer {cls.__name__} does not update each element by itself",
            allowed="optimizers such as AdamW, SGD, RMSprop or Adagrad, which shards can use; "
            '"optimizer": {"type": "Muon"} or {"type": "Lamb"} in the engine config',
            fix="initialize(optimizer=...)",
        )


def initial_state(optimizer: torch.optim.Optimizer) -> dict[Tensor, Any]:
    """The state before the first step: none, but for Adagrad, which makes its own when built."""
    if not isinstance(optimizer, torch.optim.Adagrad):
        return {}
    groups = [dict(group) for group in optimizer.param_groups]
    return dict(type(optimizer)(groups, **optimizer.defaults).state)


def rebind_params(
    optimizer: torch.optim.Optimizer, runs: Sequence[OptimizerShard]
) -> torch.optim.Optimizer:
    """Puts this rank's runs into the user's own optimizer, which schedulers may hold already.

    Raises:
        ConfigError: the optimizer has taken steps.
    """
    if not _took_no_step(optimizer):
        raise ConfigError(
            f"the {type(optimizer).__name__} passed to initialize has taken steps already",
            allowed="a fresh optimizer",
            fix="make it just before initialize",
        )
    for group, options in enumerate(optimizer.param_groups):
        options["params"] = [run.weight for run in runs if run.group == group]
    optimizer.state.clear()
    optimizer.state.update(initial_state(optimizer))
    return optimizer


def _took_no_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it has taken no step; Adagrad has state from the beginning."""
    if isinstance(optimizer, torch.optim.Adagrad):
        return all(float(state["step"]) == 0 for state in optimizer.state.values())
    return not optimizer.state


class ChunkedOptimizer(ShardedOptimizer):
    """Steps the torch optimizer once a piece, with that piece's runs as its only parameters.

    What is on the device is one piece, and comes first: a GPU works on it while the CPU goes on.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, runs: Sequence[OptimizerShard]) -> None:
        super().__init__(optimizer, runs)
        homes = {id(run.unit.state_store): run.unit.state_store for run in runs}.values()
        self._chunks_by_store = [
            (home, _group_shards(home, [run for run in runs if run.unit.state_store is home]))
            for home in sorted(homes, key=lambda home: home.memory_kind is not MemoryKind.DEVICE)
        ]

    def step(self, factor: float) -> None:
        with self._restoring_params():
            for home, parts in self._chunks_by_store:
                pieces = [_make_chunk(runs) for runs in parts]
                for number in home.update_chunks(pieces, self.torch_optimizer.state):
                    self._restrict_params(parts[number])
                    self.step_shards(parts[number], factor)

    @contextmanager
    def _restoring_params(self) -> Iterator[None]:
        """Afterwards the torch optimizer has all of its parameters again."""
        whole = [group["params"] for group in self.torch_optimizer.param_groups]
        try:
            yield
        finally:
            for group, params in zip(self.torch_optimizer.param_groups, whole, strict=True):
                group["params"] = params

    def _restrict_params(self, runs: Sequence[OptimizerShard]) -> None:
        for number, group in enumerate(self.torch_optimizer.param_groups):
            group["params"] = [run.weight for run in runs if run.group == number]


def choose_optimizer_class(runs: Sequence[OptimizerShard]) -> type[ShardedOptimizer]:
    """Piecewise where anything rests elsewhere than on the device."""
    moved = any(run.unit.state_store.memory_kind is not MemoryKind.DEVICE for run in runs)
    return ChunkedOptimizer if moved else ShardedOptimizer


def _group_shards(home: StateStore, runs: Sequence[OptimizerShard]) -> list[list[OptimizerShard]]:
    """Runs that are updated together: a unit's, and no more elements than the home has room for."""
    if home.memory_kind is MemoryKind.DEVICE:
        return [list(runs)]
    found: list[list[OptimizerShard]] = []
    for _, unit in groupby(runs, key=lambda run: id(run.unit)):
        room = 0
        for number, run in enumerate(unit):
            numel = run.weight.numel()
            if not number or (home.chunk_numel is not None and numel > room):
                found.append([])
                room = home.chunk_numel or 0
            found[-1].append(run)
            room -= numel
    return found


def _make_chunk(runs: Sequence[OptimizerShard]) -> UpdateChunk:
    main = runs[0].unit.main_weights
    if main is None:
        raise RuntimeError("a frozen unit has no runs")
    return UpdateChunk(
        main, tuple(run.weight for run in runs), tuple(_model_weight_range(run) for run in runs)
    )


def _model_weight_range(run: OptimizerShard) -> Tensor:
    """The model weights that follow a run."""
    unit = run.unit
    start = unit.owned.start
    return unit.weights.owned_range(unit.owned)[
        run.layout_range.start - start : run.layout_range.stop - start
    ]
