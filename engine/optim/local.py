"""The optimizer of one rank: a torch optimizer over this rank's parts of the main weights.

Most optimizers work element by element, so a shard needs to know nothing of its neighbours; the
others are told of whole parameters (`whole`). A parameter group's part of a unit is one run of the
unit's flat buffer, hence one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine.errors import ConfigError
from rayzero.engine.optim.whole import NeedsWholes
from rayzero.engine.zero.unit import Unit

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

# Of torch's own: those that look at a parameter's shape, or at all parameters at once.
_WHOLE_TENSOR = {"LBFGS", "Muon", "Adafactor", "SparseAdam"}


@dataclass(frozen=True)
class Run:
    """One parameter group's part of one unit's main weights on this rank, and its gradient.

    `extent` is where it lies in the unit's flat layout.
    """

    group: int
    unit: Unit
    extent: slice
    weight: nn.Parameter
    grad: Tensor


def runs_of(units: Sequence[Unit]) -> list[Run]:
    """All runs of this rank, as views of the units' main weights and main grads."""
    runs = []
    for unit in units:
        if unit.main is None or unit.grads is None:
            continue
        grads = unit.grads.owned()
        for group, whole in unit.layout.runs(unit.owned):
            for part in _cut(whole, unit.home.piece_numel):
                extent = slice(unit.owned.start + part.start, unit.owned.start + part.stop)
                runs.append(Run(group, unit, extent, nn.Parameter(unit.main[part]), grads[part]))
    return runs


def _cut(part: slice, numel: int | None) -> Iterator[slice]:
    """Parts of at most `numel` elements: state that rests in a file comes by such pieces."""
    step = numel or part.stop - part.start
    for start in range(part.start, part.stop, step):
        yield slice(start, min(start + step, part.stop))


class LocalOptimizer:
    """Steps a torch optimizer whose parameters are this rank's runs.

    Attributes:
        torch: the torch optimizer, which learning-rate schedulers and users see.
        runs: what it updates.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, runs: Sequence[Run]) -> None:
        self.torch = optimizer
        self.runs = runs
        # The contract torch's own GradScaler uses: such an optimizer divides gradients by
        # `grad_scale` inside its kernel, which spares a pass over them. The scale is a float32.
        self._scales = bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
            run.weight.dtype is torch.float32 for run in runs
        )

    def step(self, factor: float) -> None:
        """Updates the main weights with `factor` times the main grads, which it may overwrite.

        Collective for optimizers that look at whole parameters, local for all others.
        """
        self.update(self.runs, factor)

    def update(self, runs: Sequence[Run], factor: float) -> None:
        """Steps the torch optimizer, whose parameters at the moment are these runs."""
        for run in runs:
            # The same tensor, unless gradients are summed in another dtype.
            run.weight.grad = run.grad.to(run.weight.dtype)
        if factor != 1.0:
            self._scale(runs, factor)
        self.torch.step()
        for run in runs:
            run.weight.grad = None
        if self._scales:
            self.torch.grad_scale = None  # type: ignore[attr-defined]

    def begin_anew(self) -> None:
        """The state is what it is before the first step."""
        self.torch.state.clear()
        self.torch.state.update(first_state(self.torch))

    @property
    def lr(self) -> float:
        """The first group's learning rate."""
        return float(self.torch.param_groups[0]["lr"])

    def _scale(self, runs: Sequence[Run], factor: float) -> None:
        if self._scales:
            device = runs[0].weight.device
            scale = torch.tensor(1.0 / factor, dtype=torch.float32, device=device)
            self.torch.grad_scale = scale  # type: ignore[attr-defined]
        else:
            grads = [run.weight.grad for run in runs if run.weight.grad is not None]
            torch._foreach_mul_(grads, factor)


def group_runs(runs: Sequence[Run], options: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
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
    if issubclass(cls, NeedsWholes):
        return
    if any(base.__name__ in _WHOLE_TENSOR for base in cls.__mro__):
        raise ConfigError(
            f"the optimizer {cls.__name__} does not update each element by itself",
            allowed="optimizers such as AdamW, SGD, RMSprop or Adagrad, which shards can use; "
            '"optimizer": {"type": "Muon"} or {"type": "Lamb"} in the engine config',
            fix="initialize(optimizer=...)",
        )


def first_state(optimizer: torch.optim.Optimizer) -> dict[Tensor, Any]:
    """The state before the first step: none, but for Adagrad, which makes its own when built."""
    if not isinstance(optimizer, torch.optim.Adagrad):
        return {}
    groups = [dict(group) for group in optimizer.param_groups]
    return dict(type(optimizer)(groups, **optimizer.defaults).state)


def take_over(optimizer: torch.optim.Optimizer, runs: Sequence[Run]) -> torch.optim.Optimizer:
    """Puts this rank's runs into the user's own optimizer, which schedulers may hold already.

    Raises:
        ConfigError: the optimizer has taken steps.
    """
    if not _is_fresh(optimizer):
        raise ConfigError(
            f"the {type(optimizer).__name__} passed to initialize has taken steps already",
            allowed="a fresh optimizer",
            fix="make it just before initialize",
        )
    for group, options in enumerate(optimizer.param_groups):
        options["params"] = [run.weight for run in runs if run.group == group]
    optimizer.state.clear()
    optimizer.state.update(first_state(optimizer))
    return optimizer


def _is_fresh(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it has taken no step; Adagrad has state from the beginning."""
    if isinstance(optimizer, torch.optim.Adagrad):
        return all(float(state["step"]) == 0 for state in optimizer.state.values())
    return not optimizer.state
