"""Optimizers whose momenta are reduced as signs: 1-bit Adam, 0/1 Adam, 1-bit LAMB.

`compression/gradients.py` reduces gradients in steps that change variances, and momenta in the
other steps. In the latter the optimizer gets the gradient that yields the reduced momentum. Every
step is synchronized: 0/1 Adam's local steps, which leave ranks with different weights, are not
implemented.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rayzero.engine.config.optimizers import OneBitLambParams
from rayzero.engine.device import get_device
from rayzero.engine.optim.optimizers import ElementwiseOptimizer, Lamb, LambUpdate
from rayzero.engine.optim.whole_params import WholeParamOps


class MomentumReduced(torch.optim.Optimizer):
    """Base of optimizers whose momenta are reduced. Their state has `step` and `exp_avg`."""

    freeze_step: int

    def is_variance_frozen(self, weight: Tensor) -> bool:
        """Returns whether the parameter's next step leaves its variance unchanged."""
        steps = self.state.get(weight, {}).get("step")
        return steps is not None and self.freezes_after(float(steps))

    def freezes_after(self, steps: float) -> bool:
        """Returns whether the step after `steps` steps leaves variances unchanged. A memory plan
        asks this for infinity."""
        return steps >= self.freeze_step


class OneBitAdam(ElementwiseOptimizer, MomentumReduced):
    """1-bit Adam (Tang et al., 2021): learns variances during a warm-up, then freezes them.

    After the warm-up, ranks communicate momenta, which tolerate compression to signs. Gradients
    under changing variances do not. As in the paper there is no bias correction. Weight decay is
    decoupled. `freeze_step` should be later than the end of the schedule's warm-up.
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

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        frozen, state = self.is_variance_frozen(param), self.state[param]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        first, second = group["betas"]
        average = state["exp_avg"]
        square = state["exp_avg_sq"]
        state["step"] += 1
        average.lerp_(grad, 1.0 - first)
        if not frozen:
            square.mul_(second).addcmul_(grad, grad, value=1.0 - second)
        # Elements that never had a gradient have no variance, and signs have no zero: without the
        # mask they would take huge steps.
        update = average / (square.sqrt() + group["eps"])
        update.masked_fill_(square == 0, 0.0)
        param.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])


class ZeroOneAdam(OneBitAdam):
    """0/1 Adam (Lu et al., 2022) without local steps: communicates signs from the second step on,
    and learns variances ever more rarely.

    The first `var_update_scaler` updates of variances are one step apart, the next
    `var_update_scaler` are two steps apart, then four, and so on. After `var_freeze_step` there are
    none. `options` are those of `OneBitAdam`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, freeze_step=var_freeze_step, **options)
        self.var_update_scaler = var_update_scaler

    def freezes_after(self, steps: float) -> bool:
        if steps >= self.freeze_step:
            return True
        exponent = (int(steps) // self.var_update_scaler + 1).bit_length() - 1
        begun = self.var_update_scaler * ((1 << exponent) - 1)
        return bool((steps - begun + 1) % (1 << exponent))


class OneBitLamb(Lamb, MomentumReduced):
    """1-bit LAMB (Li et al., 2021): LAMB in the warm-up, then frozen variances and a trust ratio
    that follows the variances of the reduced gradients.

    After the warm-up, a parameter's ratio is the mean of its ratios in the warm-up, times a factor:
    the maximum of sqrt(frozen variance) / sqrt(fresh variance) over the elements, clamped to fixed
    limits and relative to its last value. As in the paper there is no bias correction. Signs have a
    scale for each block, so the paper's scaling of momenta to one magnitude is not needed.
    `options` are those of `OneBitLambParams`.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, **options: Any) -> None:
        own = OneBitLambParams().arguments() | options
        self.freeze_step = own.pop("freeze_step")
        self._coeff_beta = own.pop("coeff_beta")
        self._factor_limits = own.pop("factor_min"), own.pop("factor_max")
        self._factor_threshold = own.pop("factor_threshold")
        self._coefficients = torch.zeros(0)
        # In steps with frozen variances, of each segment: the highest ratio of the variances'
        # roots, and the norm of the step without weight decay.
        self._frozen: list[tuple[Tensor, Tensor]] = []
        super().__init__(params, **own | {"lr": lr, "bias_correction": False})
        self.bind_whole_params(self._whole_params)

    def bind_whole_params(self, whole_params: WholeParamOps) -> None:
        super().bind_whole_params(whole_params)
        device = next((tensor.device for tensor in whole_params.segments), torch.device("cpu"))
        size = len(whole_params.params)
        # By parameter: the mean trust ratio of the warm-up, and the last factor.
        self._coefficients = torch.zeros(2, size, dtype=torch.float64, device=device)
        self._coefficients[1] = 1.0

    def replicated_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) of state that is equal on all ranks and belongs to no element."""
        yield "onebit_lamb/coefficients", self._coefficients

    def _update_moments(
        self, tensor: Tensor, grad: Tensor, group: dict[str, Any]
    ) -> list[LambUpdate]:
        state = self.state[tensor]
        frozen = self.is_variance_frozen(tensor)
        if not frozen:
            updates = super()._update_moments(tensor, grad, group)
            if "exp_avg_sq_fresh" not in state:
                state["exp_avg_sq_fresh"] = torch.zeros_like(tensor)
            if self.is_variance_frozen(tensor):  # from the next step on
                state["exp_avg_sq_fresh"].copy_(state["exp_avg_sq"])
            return updates
        (first, second), fresh = group["betas"], state["exp_avg_sq_fresh"]
        state["step"] += 1
        state["exp_avg"].lerp_(grad, 1 - first)
        fresh.mul_(second).addcmul_(grad, grad, value=1 - second)
        root = state["exp_avg_sq"].sqrt()
        never = root == 0  # see `OneBitAdam`
        root.add_(group["eps"])
        ratios = (root / (fresh.sqrt() + group["eps"])).masked_fill_(never, 0.0)
        torch.div(state["exp_avg"], root, out=grad).masked_fill_(never, 0.0)
        flat_ratios, flat_step = ratios.view(-1), grad.view(-1)
        for segment in self._whole_params.segments[tensor]:
            extent = segment.tensor_range
            self._frozen.append((flat_ratios[extent].max(), flat_step[extent].norm()))
        grad.add_(tensor, alpha=group["weight_decay"])
        return self._segment_updates(tensor, grad, group["lr"])

    def _trust_ratios(self, updates: Sequence[LambUpdate]) -> Tensor:
        """Returns Lamb's trust ratios in the warm-up, and keeps their means. Later, returns the
        means times the factors."""
        mean, last = self._coefficients.unbind()
        if not self._frozen:
            ratios = super()._trust_ratios(updates)
            beta = self._coeff_beta
            mean.copy_(torch.where(ratios != 1.0, beta * mean + (1 - beta) * ratios, mean))
            return ratios
        highest = torch.stack([ratio for ratio, _ in self._frozen]).double()
        undecayed_norms = torch.stack([norm for _, norm in self._frozen]).double()
        self._frozen.clear()
        param_numbers = [update.param_number for update in updates]
        numbers = get_device(mean.device).send(param_numbers, torch.int64)
        directions = [update.direction for update in updates]
        norms = torch.stack(torch._foreach_norm(directions)).double()
        sums = torch.zeros(2, len(mean), dtype=torch.float64, device=mean.device)
        sums.index_add_(1, numbers, torch.stack([undecayed_norms, norms]).square())
        factor = torch.zeros_like(mean).scatter_reduce_(0, numbers, highest, "amax")
        # With weight decay, the factor applies to the part of the step that is not weight decay.
        part = (sums[0].sqrt() / sums[1].sqrt()).nan_to_num_(1.0).clamp_(max=1.0)
        factor = (factor * part + 1.0 - part).clamp_(*self._factor_limits)
        threshold = self._factor_threshold
        factor = factor.minimum(last * (1 + threshold)).maximum(last * (1 - threshold))
        last.copy_(factor)
        return mean * factor
