"""DeepSpeed's optimizer classes, for `deepspeed.ops`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import nn

from rayzero.deepspeed.lookup import resolve
from rayzero.engine.errors import ConfigError
from rayzero.engine.optim.optimizers import Lamb, Lion

__all__ = [
    "DeepSpeedCPUAdagrad",
    "DeepSpeedCPUAdam",
    "DeepSpeedCPULion",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
]


Params: TypeAlias = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


class _IsAnyAdam(type):
    """Makes torch's Adam and AdamW instances of `FusedAdam`: the engine uses them for a config's
    Adam, and their update is the same."""

    def __instancecheck__(cls, value: object) -> bool:
        return issubclass(type(value), torch.optim.Adam if cls is FusedAdam else cls)


class FusedAdam(torch.optim.Adam, metaclass=_IsAnyAdam):
    """AdamW (Loshchilov and Hutter, 2019), or Adam with weight decay in the gradient.
    `set_grad_none` has no effect: the engine owns the gradients."""

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        set_grad_none: bool = True,
        **options: Any,
    ) -> None:
        if not bias_correction:
            raise ConfigError(
                f"{type(self).__name__}(bias_correction=False) was given",
                allowed="True: torch's kernels always correct the moments' bias",
            )
        super().__init__(params, lr=lr, decoupled_weight_decay=adam_w_mode, **options)


class DeepSpeedCPUAdam(FusedAdam):
    """`FusedAdam`. `zero_optimization.offload_optimizer` decides where the state is kept.
    `fp32_optimizer_states` has no effect: moments have the dtype of main weights, which is fp32
    unless `bf16.bf16_master_weights_and_grads` is set."""

    def __init__(
        self,
        model_params: Params,
        lr: float = 1e-3,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(model_params, lr, adam_w_mode=adamw_mode, **options)

    def step_subgroup(self, subgroup_id: int, closure: Any = None) -> None:
        """Raises ConfigError, as `rollback_subgroup` does: the engine updates all parameters."""
        raise ConfigError(
            "a part of the parameters of DeepSpeedCPUAdam was to be stepped or rolled back",
            fix="call engine.step(), which updates all parameters",
        )

    rollback_subgroup = step_subgroup


class FusedLion(Lion):
    """`rayzero.engine.optim.optimizers.Lion`. `set_grad_none` has no effect."""

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay)


class DeepSpeedCPULion(FusedLion):
    """`FusedLion`. `zero_optimization.offload_optimizer` decides where the state is kept."""

    def __init__(
        self, model_params: Params, *args: Any, fp32_optimizer_states: bool = True, **options: Any
    ) -> None:
        super().__init__(model_params, *args, **options)


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """torch's Adagrad. `amsgrad` has no effect, as in DeepSpeed."""

    def __init__(
        self,
        model_params: Params,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay, **options)


class FusedLamb(Lamb):
    """`rayzero.engine.optim.optimizers.Lamb`. `max_grad_norm` must be 0, because the config's
    `gradient_clipping` clips."""

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        if max_grad_norm or amsgrad:
            raise ConfigError(
                f"FusedLamb(max_grad_norm={max_grad_norm}, amsgrad={amsgrad}) was given",
                allowed="max_grad_norm=0, amsgrad=False",
                fix="set gradient_clipping in the config",
            )
        super().__init__(params, lr, **options)


def __getattr__(name: str) -> Any:
    return resolve("ops", name)
