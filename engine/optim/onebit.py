"""1-bit Adam (Tang et al. 2021): Adam that learns its variances in a warm-up and then keeps them.

What travels after that is the momentum, which bears being compressed to signs where gradients under
changing variances do not.

This is the update only. `zero/onebit.py` has the ranks' momenta travel as signs, and hands back the
gradient that makes this rank's momentum the one that arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


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

    def frozen(self, weight: Tensor) -> bool:
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
        frozen, state = self.frozen(weight), self.state[weight]
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
