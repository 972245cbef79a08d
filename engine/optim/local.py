"""The optimizer of one rank: a torch optimizer over this rank's parts of the main weights.

Every optimizer here works element by element, so a shard needs to know nothing of its neighbours.
A parameter group's part of a unit is one run of the unit's flat buffer, hence one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine.config import OptimizerConfig
from rayzero.engine.errors import ConfigError
from rayzero.engine.zero.unit import Unit

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
_CLASSES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "SGD": torch.optim.SGD,
}


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
        """Updates the main weights with `factor` times the main grads."""
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

    @property
    def lr(self) -> float:
        """The first group's learning rate."""
        return float(self.torch.param_groups[0]["lr"])

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's tensors as large as the weights."""
        return sum(
            value.nbytes
            for state in self.torch.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.ndim > 0
        )

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
    """Refuses an optimizer, or its class, that does not work element by element.

    Raises:
        ConfigError: shards of parameters would not be updated as whole parameters are.
    """
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    if any(base.__name__ in _WHOLE_TENSOR for base in cls.__mro__):
        raise ConfigError(
            f"the optimizer {cls.__name__} does not update each element by itself",
            allowed="optimizers such as AdamW, SGD, RMSprop or Adagrad, which shards can use",
            fix="initialize(optimizer=...)",
        )


def take_over(optimizer: torch.optim.Optimizer, runs: Sequence[Run]) -> torch.optim.Optimizer:
    """Puts this rank's runs into the user's own optimizer, which schedulers may hold already.

    Raises:
        ConfigError: the optimizer has taken steps.
    """
    if optimizer.state:
        raise ConfigError(
            f"the {type(optimizer).__name__} passed to initialize has taken steps already",
            allowed="a fresh optimizer",
            fix="make it just before initialize",
        )
    for group, options in enumerate(optimizer.param_groups):
        options["params"] = [run.weight for run in runs if run.group == group]
    return optimizer


def maker(config: OptimizerConfig) -> MakeOptimizer:
    """The constructor that a config's `optimizer` section asks for.

    Raises:
        ConfigError: a parameter is unknown to the optimizer, or has a wrong value.
    """
    params = dict(config.params)
    name = config.type
    if name == "Adam" and params.pop("adam_w_mode", True):  # as in DeepSpeed: decoupled by default
        name = "AdamW"
    if isinstance(params.get("betas"), list):
        params["betas"] = tuple(params["betas"])

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        cls = _CLASSES[name]
        try:
            return cls(groups, **({"fused": True} | params))
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            raise ConfigError(
                f"optimizer.params for {config.type}: {error}",
                allowed=f"the arguments of torch.optim.{name}",
                fix="optimizer.params in the engine config",
            ) from None

    return make
