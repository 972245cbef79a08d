"""Muon: a matrix's momentum, orthogonalised, is its step (Jordan et al., 2024); Adam for the rest.

A matrix is orthogonalised as a whole, once a step, on the rank that owns it (`Wholes.transform`);
everything else is element by element on the parts that each rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor

from rayzero.engine.errors import ConfigError
from rayzero.engine.optim import newton_schulz
from rayzero.engine.optim.whole import Chosen, OwnWholes, WholeParam, Wholes

MUON = {
    "lr": 0.02,
    "momentum": 0.95,
    "weight_decay": 0.0,
    "nesterov": True,
    "ns_method": "gram",
    "ns_steps": 5,
    "adjust_lr_fn": "original",
}
ADAM = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}


class Muon(torch.optim.Optimizer):
    """One moment for matrices, two for the rest. Matrices' gradients are overwritten.

    A group's `use_muon` says which half it belongs to. Groups of Muon's half have the keys of
    `MUON`, the others those of `ADAM`; what a group leaves out has the value given there.

    Args:
        params: parameter groups; by default a group is Muon's if all its parameters are matrices.
        decoupled: whether Adam's weight decay is AdamW's.
    """

    def __init__(self, params: Iterable[Any], *, decoupled: bool = True) -> None:
        groups = _grouped(params)
        self._guessed = [number for number, one in enumerate(groups) if "use_muon" not in one]
        # The other half's optimizer: torch's own, which works on this one's groups and state.
        adam_class = torch.optim.AdamW if decoupled else torch.optim.Adam
        self._adam = adam_class([torch.zeros(0)], fused=True)
        super().__init__([_completed(group, self._adam.defaults) for group in groups], {})
        self._wholes: Wholes = OwnWholes(self)

    def bind(self, wholes: Wholes) -> None:
        """Raises ConfigError: a group is in the wrong half."""
        for number, group in enumerate(self.param_groups):
            shapes = [param.shape for param in wholes.params_of([number])]
            wrong = [shape for shape in shapes if not is_matrix(shape)]
            if group["use_muon"] and wrong:
                raise ConfigError(
                    f"parameter group {number} has use_muon, and a parameter of shape {wrong[0]}",
                    allowed="parameters of two dimensions or more",
                    fix="use_muon of that parameter, or of that group",
                )
            if number in self._guessed and shapes and not wrong and not group["use_muon"]:
                raise ConfigError(
                    f"parameter group {number} does not say whether it is Muon's",
                    allowed="use_muon: true or false in every group",
                    fix='the groups, or "optimizer": {"type": "Muon"} in the engine config',
                )
        self._wholes = wholes

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient. Collective where parameters are sharded."""
        loss = closure() if closure is not None else None
        self._step_adam()
        parts: dict[int, Tensor] = {}
        updates: list[tuple[Tensor, Tensor, float]] = []
        for group in self._muon_groups():
            for tensor in group["params"]:
                if tensor.grad is None:
                    continue
                direction = self._averaged(tensor, tensor.grad, group).view(-1)
                weight = tensor.view(-1).mul_(1 - group["lr"] * group["weight_decay"])
                for one in self._wholes.segments(tensor):
                    size = group["lr"] * scale(one.param.shape, group["adjust_lr_fn"])
                    parts[one.param.number] = direction[one.at]
                    updates.append((weight[one.at], direction[one.at], size))
        rounded = {newton_schulz.ROUNDED[group["ns_method"]] for group in self._muon_groups()}
        dtype = rounded.pop() if len(rounded) == 1 else None
        self._wholes.transform(self._matrices(), parts, self._solve, dtype)
        for weight, direction, size in updates:
            weight.add_(direction, alpha=-size)
        return loss

    def _matrices(self) -> Chosen:
        numbers = [number for number, group in enumerate(self.param_groups) if group["use_muon"]]
        beside = [tensor for group in self.param_groups for tensor in group["params"]]
        return Chosen(tuple(numbers), tuple(beside))

    def _muon_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["use_muon"]]

    def _step_adam(self) -> None:
        self._adam.param_groups = [group for group in self.param_groups if not group["use_muon"]]
        self._adam.state = self.state
        if any(group["params"] for group in self._adam.param_groups):
            self._adam.step()

    def _averaged(self, tensor: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        """Moves the momentum on, and puts what is to be orthogonalised in the gradient's place."""
        state = self.state[tensor]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(tensor)
        average = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        return grad.lerp_(average, group["momentum"]) if group["nesterov"] else grad.copy_(average)

    def _solve(self, param: WholeParam, values: Tensor) -> Tensor:
        group = self.param_groups[param.group]
        matrix = values.view(_matrix_shape(param.shape))
        return newton_schulz.METHODS[group["ns_method"]](matrix, group["ns_steps"]).reshape(-1)


def is_matrix(shape: Sequence[int]) -> bool:
    return len(shape) >= 2


def scale(shape: Sequence[int], how: str) -> float:
    """What a step of a matrix is multiplied by: its norm depends on the shape.

    "original" is Jordan's, which takes the last two dimensions; "match_rms_adamw" gives steps the
    root mean square of AdamW's (Liu et al., 2025).
    """
    if how == "match_rms_adamw":
        rows, columns = _matrix_shape(shape)[-2:]
        return 0.2 * sqrt(max(rows, columns))
    return sqrt(max(1.0, shape[-2] / shape[-1]))


def _matrix_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Filters of a convolution are one matrix; of other shapes the last two dimensions are."""
    return (shape[0], prod(shape[1:])) if len(shape) == 4 else tuple(shape)


def _grouped(params: Iterable[Any]) -> list[dict[str, Any]]:
    found = list(params)
    return found if found and isinstance(found[0], dict) else [{"params": found}]


def _completed(group: dict[str, Any], adams: dict[str, Any]) -> dict[str, Any]:
    """A group with all its half's keys; torch's Adam has some besides ours."""
    params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    muon = group.get("use_muon", bool(params) and all(is_matrix(one.shape) for one in params))
    usual = MUON if muon else adams | ADAM
    return {**usual, **group, "params": params, "use_muon": muon}
