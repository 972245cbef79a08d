"""The precision of a run: its dtypes, and how main weights relate to model weights.

| config | model weights | main weights | main grads | loss scale |
|---|---|---|---|---|
| none | the model's own dtype | the same memory | the same dtype | none |
| torch_autocast | the model's own dtype | the same memory | the same dtype | fp16: dynamic |
| bf16 | bfloat16 | fp32, from the original values | fp32 | none |
| bf16 with bf16_master_weights_and_grads | bfloat16 | the same memory | bfloat16 | none |
| fp16 | float16 | fp32, from the original values | fp32 | dynamic or fixed |

`data_types.grad_accum_dtype` overrides the dtype of main grads. Each addition over ranks and
micro-steps is rounded to that dtype. The optimizer reads the sums in the main weights' dtype.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayzero.engine.config import EngineConfig
from rayzero.engine.config.sections import Fp16Config
from rayzero.engine.precision.loss_scale import NO_SCALER, DynamicScaler, FixedScaler, LossScaler
from rayzero.engine.tensor_tree import map_tensors


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes and the loss scale of a run. By default everything is in the model's own dtype.
    Methods' arguments named `original` are dtypes or values before any conversion.

    Attributes:
        dtype: the 16-bit dtype of model weights, forward and backward. None for the model's own.
        wide_main: keep main weights, sums of gradients and updates in fp32 (Micikevicius et al.,
            2018), apart from the model weights.
        input_casting: cast the model's floating-point inputs to `dtype`.
        scaler: the loss scale, by which the optimizer divides gradients.
        update_dtype: the dtype of updates and of optimizer state. None for the main weights' own.
        buffer_dtype: the dtype of the model's floating-point buffers. None for their own.
        autocast_device, autocast_dtype: arguments of a torch.autocast around forward, in which
            torch picks a dtype for each operation: 16 bits if that is safe. No autocast if the
            dtype is None.
    """

    dtype: torch.dtype | None = None
    wide_main: bool = False
    input_casting: bool = True
    scaler: LossScaler = NO_SCALER
    grad_dtype_override: torch.dtype | None = None
    update_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    autocast_device: str = "cpu"
    autocast_dtype: torch.dtype | None = None

    @property
    def average_before_reduce(self) -> bool:
        """Whether gradients are averaged through the initial gradient of backward, which is free.
        If not, the optimizer averages, so that a factor such as 1/3 is not rounded to 16 bits."""
        return self.dtype is None and self.autocast_dtype is None

    def model_dtype(self, original: torch.dtype) -> torch.dtype:
        return (self.dtype or original) if original.is_floating_point else original

    def dtype_of_buffer(self, original: torch.dtype) -> torch.dtype:
        return (self.buffer_dtype or original) if original.is_floating_point else original

    def grad_dtype(self, original: torch.dtype) -> torch.dtype:
        """Returns the dtype in which main grads are stored, communicated and summed."""
        if original.is_complex and self.dtype is None:
            return original
        main = torch.float32 if self.wide_main else self.dtype or original
        return self.grad_dtype_override or main

    def main_weights(self, original: Tensor, model_weights: Tensor) -> Tensor:
        """Returns the main weights of a range of model weights, possibly in the same memory."""
        return original.to(torch.float32, copy=True) if self.wide_main else model_weights

    def copy_to_model(self, main_weights: Tensor, model_weights: Tensor) -> None:
        """Updates model weights from main weights after an optimizer step."""
        if self.wide_main:
            model_weights.copy_(main_weights)

    def cast_inputs(self, value: Any) -> Any:
        """Casts the model's floating-point inputs to the dtype of its weights."""
        dtype = self.dtype
        if dtype is None or not self.input_casting:
            return value
        return map_tensors(value, lambda x: x.to(dtype) if x.is_floating_point() else x)

    def forward_context(self) -> AbstractContextManager[Any]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.autocast_device, dtype=self.autocast_dtype)


CONFIG_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The dtypes by their names in the config."""

# As in torch's GradScaler: no hysteresis and a longer window. GradScaler has no minimum. But if
# gradients overflow at a scale of 1, a lower scale is not the remedy.
_AUTOCAST_RULES = Fp16Config(loss_scale_window=2000, hysteresis=1)


def choose_precision(config: EngineConfig, device: torch.device) -> Precision:
    """Returns the precision of a run. Config parsing has refused unsupported combinations."""
    fp16 = config.fp16
    autocast = config.torch_autocast
    types = config.data_types
    options: dict[str, Any] = {
        "grad_dtype_override": CONFIG_DTYPES.get(types.grad_accum_dtype or ""),
        "buffer_dtype": CONFIG_DTYPES.get(types.buffer_dtype or ""),
    }
    if autocast.enabled:
        options |= {
            "autocast_device": device.type,
            "autocast_dtype": CONFIG_DTYPES[autocast.dtype],
        }
    if fp16.enabled:
        options |= {
            "dtype": torch.float16,
            "wide_main": True,
            "input_casting": fp16.auto_cast,
            "scaler": FixedScaler(fp16.loss_scale) if fp16.loss_scale else DynamicScaler(fp16),
        }
    elif config.bf16.enabled:
        options |= {
            "dtype": torch.bfloat16,
            "wide_main": not config.bf16.bf16_master_weights_and_grads,
        }
        if not options["wide_main"] and not config.bf16.bf16_optimizer_states:
            options["update_dtype"] = torch.float32
    elif autocast.enabled and autocast.dtype == "fp16":
        options["scaler"] = DynamicScaler(_AUTOCAST_RULES)
    return Precision(**options)


def clamp_to_dtype(value: float, dtype: torch.dtype) -> float:
    """Returns `value`, or infinity with its sign if it is out of the dtype's range: torch refuses
    to fill a tensor with such a value."""
    return value if abs(value) <= torch.finfo(dtype).max else math.copysign(math.inf, value)


def post_reduce_scale(
    micro_steps: int,
    world_size: int,
    *,
    average_before_reduce: bool,
    prescale: bool,
    predivide: float,
) -> float:
    """Returns the factor for reduced gradients. The initial gradient of backward contains the rest
    of the average.

    Dividing before or after the sum over ranks is the same in exact arithmetic and free either way.
    In 16 bits, dividing before may make small gradients underflow, dividing after may make large
    ones overflow.

    Args:
        average_before_reduce: see `Precision`.
        prescale: divide by the number of ranks before the sum (`prescale_gradients`).
        predivide: divide by this number before the sum and by the rest after it
            (`gradient_predivide_factor`). As in DeepSpeed, `prescale` takes precedence.
    """
    if average_before_reduce and (prescale or predivide == 1.0):
        return 1.0
    over_steps = 1.0 if average_before_reduce else 1.0 / micro_steps
    return over_steps if prescale else over_steps * predivide / world_size
