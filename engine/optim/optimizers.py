"""Lion, LAMB, 1-bit Adam, Adam without bias correction.

Lion: the sign of an interpolated momentum is the step (Chen et al., 2023).

LAMB: Adam's step, scaled for each parameter by its trust ratio (You et al., 2020).

The ratio is |weight| / |step| of the whole parameter, so ranks add up squared norms: one vector of
two numbers a parameter. As in DeepSpeed the ratio is cut to bounds, and the bias corrections
scale the whole step, weight decay included.

Adam without bias correction, which DeepSpeed offers and torch does not.

1-bit Adam (Tang et al. 2021): Adam that learns its variances in a warm-up and then keeps them.

What travels after that is the momentum, which bears being compressed to signs where gradients under
changing variances do not.

This is the update only. `zero/onebit.py` has the ranks' momenta travel as signs, and hands back the
gradient that makes this rank's momentum the one that arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from rayzero.engine.optim.whole_params import LocalWholeParamOps, WholeParamOps

CHUNK_NUMEL = 1 << 16  # elements: what the passes below touch stays in a core's cache


class Lion(torch.optim.Optimizer):
    """Works element by element, with one moment.

    Where the interpolated momentum is zero the weight stays, as in the paper: padding and unused
    embedding rows do not drift.

    Args:
        params: parameters or parameter groups.
        lr: learning rate; the usual ones are a tenth to a third of AdamW's.
        betas: of the step's interpolation, and of the momentum. The defaults are DeepSpeed's.
        weight_decay: decoupled.
    """

    # torch's contract with its GradScaler: gradients are divided by `grad_scale`, if it is set.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self.grad_scale: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(param)
        if param.grad is None:
            return
        tensors = (param.view(-1), param.grad.reshape(-1), state["exp_avg"].view(-1))
        size = CHUNK_NUMEL if param.device.type == "cpu" else max(1, param.numel())
        (beta, forget), lr = group["betas"], group["lr"]
        for weight, grad, average in zip(*(one.split(size) for one in tensors), strict=True):
            if self.grad_scale is not None:
                grad = grad / self.grad_scale
            direction = average.lerp(grad, 1 - beta).sign_()
            weight.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
            average.lerp_(grad, 1 - forget)


@dataclass(frozen=True)
class _LambUpdate:
    """This rank's part of one parameter: flat views, and the step size with its corrections."""

    param_number: int
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
        self._whole_params: WholeParamOps = LocalWholeParamOps(self)

    def bind_whole_params(self, wholes: WholeParamOps) -> None:
        self._whole_params = wholes

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient. Collective where parameters are sharded."""
        loss = closure() if closure is not None else None
        parts = []
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    parts += self._update_moments(tensor, tensor.grad, group)
        ratios = self._trust_ratios(parts)
        for part in parts:
            ratio = ratios[part.param_number]
            if ratio:  # DeepSpeed's bounds do not hold for a parameter without a ratio
                ratio = min(max(ratio, part.group["min_coeff"]), part.group["max_coeff"])
            part.weight.add_(part.direction, alpha=-part.step_size * (ratio or 1.0))
        return loss

    def _update_moments(
        self, tensor: Tensor, grad: Tensor, group: dict[str, Any]
    ) -> list[_LambUpdate]:
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
            _LambUpdate(
                one.param.number, weight[one.tensor_range], direction[one.tensor_range], size, group
            )
            for one in self._whole_params.segments(tensor)
        ]

    def _trust_ratios(self, parts: Sequence[_LambUpdate]) -> list[float]:
        """Each parameter's trust ratio, by its number; 0 where it has none, as a norm is zero."""
        device = parts[0].weight.device if parts else torch.device("cpu")
        squares = torch.zeros(2, self._whole_params.num_params, dtype=torch.float64, device=device)
        if parts:
            numbers = torch.tensor([part.param_number for part in parts], device=device)
            for row, tensors in (
                (squares[0], [part.weight for part in parts]),
                (squares[1], [part.direction for part in parts]),
            ):
                norms = torch.stack(torch._foreach_norm(tensors))
                row.index_add_(0, numbers, norms.double().square())
        self._whole_params.all_reduce_sum(squares)
        weight, direction = squares.sqrt()
        found: list[float] = torch.where(direction > 0, weight / direction, 0.0).tolist()
        return found


# A step count at which torch's corrections 1 - beta^step are exactly 1. Adding 1 to it gives the
# same float32, so the count never changes.
NO_CORRECTION_STEP = 1e15


class AdamWithoutBiasCorrection(torch.optim.Adam):
    """torch's Adam with its bias corrections at their limit from the first step on."""

    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and not self.state[param]:
                    device = param.device if group["fused"] else torch.device("cpu")
                    moments = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]
                    self.state[param]["step"] = torch.tensor(
                        NO_CORRECTION_STEP, dtype=torch.float32, device=device
                    )
                    self.state[param].update({key: torch.zeros_like(param) for key in moments})
        return super().step(closure)


def make_adam(
    params: Iterable[Any],
    *,
    bias_correction: bool,
    adam_w_mode: bool,
    torch_adam: bool,
    weight_decay: float | None = None,
    **options: Any,
) -> torch.optim.Optimizer:
    """torch's Adam or AdamW from DeepSpeed's params; weight decay as `AdamParams` documents."""
    if weight_decay is None:
        weight_decay = 0.01 if torch_adam and adam_w_mode else 0.0
    options["weight_decay"] = weight_decay
    if bias_correction and adam_w_mode:
        return torch.optim.AdamW(params, **options)
    cls = torch.optim.Adam if bias_correction else AdamWithoutBiasCorrection
    return cls(params, decoupled_weight_decay=adam_w_mode, **options)


class OneBitAdam(torch.optim.Optimizer):
    """Adam without bias correction, as in the paper; weight decay is decoupled.

    Args:
        freeze_step: so many steps learn variances. They should outlast the schedule's warm-up.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        freeze_step: int = 100_000,
    ) -> None:
        if freeze_step < 1:
            raise ValueError(f"freeze_step is {freeze_step}: no variance would be learned")
        if not 0.0 < betas[0] < 1.0 or not 0.0 <= betas[1] < 1.0:
            raise ValueError(f"betas are {betas}")
        self.freeze_step = freeze_step
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def is_variance_frozen(self, weight: Tensor) -> bool:
        """Whether the next step of this parameter keeps its variance."""
        steps = self.state.get(weight, {}).get("step")
        return steps is not None and float(steps) >= self.freeze_step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)

    def _update(self, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        frozen, state = self.is_variance_frozen(weight), self.state[weight]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        (first, second), average, square = group["betas"], state["exp_avg"], state["exp_avg_sq"]
        state["step"] += 1
        average.lerp_(grad, 1.0 - first)
        if not frozen:
            square.mul_(second).addcmul_(grad, grad, value=1.0 - second)
        # What never had a gradient has no variance: signs know no zero, and would blow it up.
        change = average / (square.sqrt() + group["eps"])
        change.masked_fill_(square == 0, 0.0)
        weight.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(change, alpha=-group["lr"])
