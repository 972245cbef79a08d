"""`deepspeed.ops.adam`: torch's fused Adam, under DeepSpeed's names and arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from rayzero.engine.errors import ConfigError

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


class FusedAdam(torch.optim.Adam):
    """AdamW, or Adam with weight decay in the gradient.

    Args:
        bias_correction: only True.
        adam_w_mode: decoupled weight decay (Loshchilov and Hutter, 2019).
        set_grad_none: of no use: gradients are the engine's.
    """

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
    """The same: where its state rests is `zero_optimization.offload_optimizer`'s to say.

    Args:
        adamw_mode: as `adam_w_mode`.
        fp32_optimizer_states: only True.
    """

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
