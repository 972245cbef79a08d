"""Lion: the sign of an interpolated momentum is the step (Chen et al., 2023)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 16  # elements: what the passes below touch stays in a core's cache


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
        size = CHUNK if param.device.type == "cpu" else max(1, param.numel())
        (beta, forget), lr = group["betas"], group["lr"]
        for weight, grad, average in zip(*(one.split(size) for one in tensors), strict=True):
            if self.grad_scale is not None:
                grad = grad / self.grad_scale
            direction = average.lerp(grad, 1 - beta).sign_()
            weight.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
            average.lerp_(grad, 1 - forget)
