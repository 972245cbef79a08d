"""DeepSpeed's optimizer and schedule classes, for `ops.adam` and `runtime.lr_schedules`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from rayzero.engine.config import SchedulerConfig
from rayzero.engine.errors import ConfigError
from rayzero.engine.optim.schedule import StepSchedule, make_lr_curve

__all__ = [
    "VALID_LR_SCHEDULES",
    "DeepSpeedCPUAdam",
    "FusedAdam",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
]


VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


class FusedAdam(torch.optim.Adam):
    """AdamW (Loshchilov and Hutter, 2019), or Adam with weight decay in the gradient.
    `set_grad_none` has no effect: gradients are the engine's."""

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
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
    """`FusedAdam`: `zero_optimization.offload_optimizer` decides where its state is kept."""

    def __init__(
        self,
        model_params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
        **options: Any,
    ) -> None:
        if not fp32_optimizer_states:
            raise ConfigError(
                "DeepSpeedCPUAdam(fp32_optimizer_states=False) was given",
                allowed="True: moments have the dtype of main weights",
            )
        super().__init__(model_params, lr, adam_w_mode=adamw_mode, **options)


class _ConfiguredSchedule(StepSchedule):
    """The schedule of a config's `scheduler` section with the class's name as `type`."""

    def __init__(self, optimizer: torch.optim.Optimizer, **params: Any) -> None:
        config = SchedulerConfig.model_validate({"type": type(self).__name__, "params": params})
        super().__init__(optimizer, make_lr_curve(config))


class WarmupLR(_ConfiguredSchedule):
    """Warm-up to the maximum, then constant. Parameters as in the config."""


class WarmupDecayLR(_ConfiguredSchedule):
    """Warm-up to the maximum, then linear decay to zero."""


class WarmupCosineLR(_ConfiguredSchedule):
    """Warm-up to the configured lr, then cosine decay."""


class OneCycle(_ConfiguredSchedule):
    """One cycle between two rates, then decay; Adam's first beta cycles inversely."""


class LRRangeTest(_ConfiguredSchedule):
    """Increases from the lowest rate without bound."""
