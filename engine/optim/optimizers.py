"""Optimizers that torch does not have: Lion, LAMB, Adam without bias correction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from rayzero.engine.config.optimizers import LambParams
from rayzero.engine.device import get_device
from rayzero.engine.optim.whole_params import WholeParamOps

CHUNK_NUMEL = 1 << 16  # elements of a CPU tensor updated at once, so that they fit a core's cache
# A step count at which torch's corrections 1 - beta^step are exactly 1. In float32, adding 1 gives
# the same number, so the count never changes.
NO_CORRECTION_STEP = 1e15


class ElementwiseOptimizer(torch.optim.Optimizer):
    """Base of optimizers that update each parameter on its own."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)
        return loss

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(ElementwiseOptimizer):
    """Lion (Chen et al., 2023): steps by the sign of an interpolated momentum.

    Where the interpolated momentum is zero the weight does not change, as in the paper: padding
    and unused embedding rows do not drift.

    Args:
        lr: learning rate, usually a tenth to a third of AdamW's.
        betas: coefficients of the step's interpolation and of the momentum, as in DeepSpeed.
        weight_decay: decoupled.
    """

    # torch's GradScaler contract: the step divides gradients by `grad_scale` if it is set.
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

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(param)
        tensors = (param.view(-1), grad.reshape(-1), state["exp_avg"].view(-1))
        size = CHUNK_NUMEL if param.device.type == "cpu" else max(1, param.numel())
        (beta, forget), lr = group["betas"], group["lr"]
        for weight, part, average in zip(*(tensor.split(size) for tensor in tensors), strict=True):
            if self.grad_scale is not None:
                part = part / self.grad_scale
            direction = average.lerp(part, 1 - beta).sign_()
            weight.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
            average.lerp_(part, 1 - forget)


@dataclass(frozen=True)
class LambUpdate:
    """The update of this rank's segment of a parameter. `weight` and `direction` are flat views,
    `step_size` is bias-corrected."""

    param_number: int
    weight: Tensor
    direction: Tensor
    step_size: float


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al., 2020): Adam's step, scaled for each parameter by its trust ratio.

    The ratio is |weight| / |step| of the whole parameter, so ranks all-reduce squared norms, two
    numbers for each parameter. As in DeepSpeed, the ratio is clamped, and the bias corrections
    scale the whole step including weight decay. Gradients are overwritten. `options` and their
    defaults are those of `LambParams`.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, **options: Any) -> None:
        defaults = LambParams().arguments() | {"lr": lr}
        if unknown := options.keys() - defaults.keys():
            raise TypeError(f"Lamb has no argument {min(unknown)!r}")
        super().__init__(params, defaults | options)
        self._whole_params = WholeParamOps.of_optimizer(self)

    def bind_whole_params(self, whole_params: WholeParamOps) -> None:
        self._whole_params = whole_params

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Collective if parameters are sharded."""
        loss = closure() if closure is not None else None
        updates = []
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    updates += self._update_moments(tensor, tensor.grad, group)
        ratios = self._trust_ratios(updates)
        for update in updates:
            ratio = ratios[update.param_number].to(update.weight.dtype)
            update.weight.addcmul_(update.direction, ratio, value=-update.step_size)
        return loss

    def _update_moments(
        self, tensor: Tensor, grad: Tensor, group: dict[str, Any]
    ) -> list[LambUpdate]:
        """Update the moments and replace the gradient by the step's direction."""
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
        return self._segment_updates(tensor, grad, size)

    def _segment_updates(self, tensor: Tensor, direction: Tensor, size: float) -> list[LambUpdate]:
        weight, direction = tensor.view(-1), direction.view(-1)
        return [
            LambUpdate(
                segment.param.number,
                weight[segment.tensor_range],
                direction[segment.tensor_range],
                size,
            )
            for segment in self._whole_params.segments[tensor]
        ]

    def _trust_ratios(self, updates: Sequence[LambUpdate]) -> Tensor:
        """Returns the trust ratios by parameter number, in float64, on the weights' device. The
        host does not wait for them."""
        params = self._whole_params.params
        device = updates[0].weight.device if updates else torch.device("cpu")
        squares = torch.zeros(2, len(params), dtype=torch.float64, device=device)
        if updates:
            numbers = get_device(device).send(
                [update.param_number for update in updates], torch.int64
            )
            weights = [update.weight for update in updates]
            directions = [update.direction for update in updates]
            norms = torch.stack(torch._foreach_norm(weights + directions)).view(2, -1)
            squares.index_add_(1, numbers, norms.double().square())
        weight, step = self._whole_params.sum_over_ranks(squares).sqrt()
        groups = [self.param_groups[param.group] for param in params]
        limits = [float(group[key]) for key in ("min_coeff", "max_coeff") for group in groups]
        least, most = get_device(device).send(limits, torch.float64).view(2, -1)
        # DeepSpeed does not clamp the ratio of a parameter without one.
        clamped = (weight / step).maximum(least).minimum(most)
        return torch.where((weight > 0) & (step > 0), clamped, 1.0)


class AdamWithoutBiasCorrection(torch.optim.Adam):
    """torch's Adam with bias corrections of 1, their limit, from the first step on."""

    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and not self.state[param]:
                    device = param.device if group["fused"] else torch.device("cpu")
                    step = torch.tensor(NO_CORRECTION_STEP, dtype=torch.float32, device=device)
                    moments = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]
                    zeros = {key: torch.zeros_like(param) for key in moments}
                    self.state[param] = {"step": step} | zeros
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
    """Returns torch's Adam or AdamW. Arguments are DeepSpeed's: see `AdamParams`."""
    if weight_decay is None:
        weight_decay = 0.01 if torch_adam and adam_w_mode else 0.0
    options["weight_decay"] = weight_decay
    if bias_correction and adam_w_mode:
        return torch.optim.AdamW(params, **options)
    cls = torch.optim.Adam if bias_correction else AdamWithoutBiasCorrection
    return cls(params, decoupled_weight_decay=adam_w_mode, **options)
