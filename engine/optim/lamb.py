"""LAMB: Adam's step, scaled for each parameter by its trust ratio (You et al., 2020).

The ratio is |weight| / |step| of the whole parameter, so ranks add up squared norms: one vector of
two numbers a parameter. As in DeepSpeed the ratio is cut to bounds, and the bias corrections
scale the whole step, weight decay included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from rayzero.engine.optim.whole import OwnWholes, Wholes


@dataclass(frozen=True)
class _Part:
    """This rank's part of one parameter: flat views, and the step size with its corrections."""

    number: int
    weight: Tensor
    direction: Tensor
    step_size: float
    group: dict[str, Any]


class Lamb(torch.optim.Optimizer):
    """Two moments. Gradients are overwritten by the step's direction.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: of the first and the second moment.
        eps: added to the root of the second moment; under it with `eps_inside_sqrt`.
        weight_decay: times the weight, added to the direction before its norm is taken.
        options: `bias_correction`, `eps_inside_sqrt`, and the bounds of the trust ratio,
            `min_coeff` and `max_coeff`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        known = {
            "bias_correction": True,
            "eps_inside_sqrt": False,
            "min_coeff": 0.01,
            "max_coeff": 10.0,
        }
        if unknown := options.keys() - known.keys():
            raise TypeError(f"Lamb has no argument {min(unknown)!r}")
        super().__init__(params, defaults | known | options)
        self._wholes: Wholes = OwnWholes(self)

    def bind(self, wholes: Wholes) -> None:
        self._wholes = wholes

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient. Collective where parameters are sharded."""
        loss = closure() if closure is not None else None
        parts = []
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    parts += self._moved(tensor, tensor.grad, group)
        ratios = self._ratios(parts)
        for part in parts:
            ratio = ratios[part.number]
            if ratio:  # DeepSpeed's bounds do not hold for a parameter without a ratio
                ratio = min(max(ratio, part.group["min_coeff"]), part.group["max_coeff"])
            part.weight.add_(part.direction, alpha=-part.step_size * (ratio or 1.0))
        return loss

    def _moved(self, tensor: Tensor, grad: Tensor, group: dict[str, Any]) -> list[_Part]:
        """Moves the moments on, and puts the direction in the place of the gradient."""
        state = self.state[tensor]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(tensor) for _ in range(2))
        state["step"] += 1
        first, second = group["betas"]
        state["exp_avg"].lerp_(grad, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
        if group["eps_inside_sqrt"]:
            root = state["exp_avg_sq"].add(group["eps"]).sqrt_()
        else:
            root = state["exp_avg_sq"].sqrt().add_(group["eps"])
        torch.div(state["exp_avg"], root, out=grad).add_(tensor, alpha=group["weight_decay"])
        size = group["lr"]
        if group["bias_correction"]:
            count = state["step"].item()
            size *= sqrt(1 - second**count) / (1 - first**count)
        weight, direction = tensor.view(-1), grad.view(-1)
        return [
            _Part(one.param.number, weight[one.at], direction[one.at], size, group)
            for one in self._wholes.segments(tensor)
        ]

    def _ratios(self, parts: Sequence[_Part]) -> list[float]:
        """Each parameter's trust ratio, by its number; 0 where it has none, as a norm is zero."""
        device = parts[0].weight.device if parts else torch.device("cpu")
        squares = torch.zeros(2, self._wholes.count, dtype=torch.float64, device=device)
        if parts:
            numbers = torch.tensor([part.number for part in parts], device=device)
            for row, tensors in (
                (squares[0], [part.weight for part in parts]),
                (squares[1], [part.direction for part in parts]),
            ):
                norms = torch.stack(torch._foreach_norm(tensors))
                row.index_add_(0, numbers, norms.double().square())
        self._wholes.add_up(squares)
        weight, direction = squares.sqrt()
        found: list[float] = torch.where(direction > 0, weight / direction, 0.0).tolist()
        return found
