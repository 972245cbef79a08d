"""Precision policies: the dtypes of a run, and how main weights relate to model weights.

| policy | model weights | main weights | main grads | loss scale |
|---|---|---|---|---|
| Native | the model's own dtype | the same memory | the same dtype | none |
| Mixed, bf16 | bfloat16 | fp32, from the original values | fp32 | none |
| Mixed, fp16 | float16 | fp32, from the original values | fp32 | dynamic or fixed |
| Autocast | the model's own dtype | the same memory | the same dtype | fp16: dynamic |

`data_types.grad_accum_dtype` overrides the dtype of main grads. Each addition over ranks and
micro-steps is rounded to it; the optimizer reads the result in the main weights' dtype.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from rayzero.engine.config import EngineConfig
from rayzero.engine.config.precision import Fp16Config
from rayzero.engine.errors import ConfigError
from rayzero.engine.precision.loss_scale import (
    NO_SCALER,
    DynamicScaler,
    DynamicScaleRules,
    FixedScaler,
    LossScaler,
)
from rayzero.engine.tensor_tree import map_tensors


class Precision(Protocol):
    """The dtype decisions of a run.

    Attributes:
        average_before_reduce: average gradients through the initial gradient of backward, which
            is free, or in the optimizer, so that a weight such as 1/3 is not rounded to the
            model's dtype.
        scaler: the loss scale; the optimizer divides gradients by it.
    """

    @property
    def average_before_reduce(self) -> bool: ...

    @property
    def scaler(self) -> LossScaler: ...

    def model_dtype(self, original: torch.dtype) -> torch.dtype:
        """The dtype of a model weight, by its original dtype."""

    def main_dtype(self, original: torch.dtype) -> torch.dtype:
        """The dtype of main weights and optimizer state."""

    def grad_dtype(self, original: torch.dtype) -> torch.dtype:
        """The dtype in which main grads are stored, communicated and summed."""

    def main_weights(self, original: Tensor, model_weights: Tensor) -> Tensor:
        """The main weights of a range of model weights; possibly the same memory."""

    def copy_to_model(self, main_weights: Tensor, model_weights: Tensor) -> None:
        """Update model weights from main weights after an optimizer step."""

    def cast_inputs(self, value: Any) -> Any:
        """Cast the model's floating-point inputs to the dtype of its weights."""

    def forward_context(self) -> AbstractContextManager[Any]:
        """The context in which the model's forward runs."""


@dataclass(frozen=True)
class NativePrecision:
    """Train in the model's own dtype. Model weights and main weights are the same tensor."""

    scaler: LossScaler = NO_SCALER
    average_before_reduce: bool = True
    grad_dtype_override: torch.dtype | None = None

    def model_dtype(self, original: torch.dtype) -> torch.dtype:
        return original

    def main_dtype(self, original: torch.dtype) -> torch.dtype:
        return original

    def grad_dtype(self, original: torch.dtype) -> torch.dtype:
        return original if original.is_complex else self.grad_dtype_override or original

    def main_weights(self, original: Tensor, model_weights: Tensor) -> Tensor:
        return model_weights

    def copy_to_model(self, main_weights: Tensor, model_weights: Tensor) -> None:
        return

    def cast_inputs(self, value: Any) -> Any:
        return value

    def forward_context(self) -> AbstractContextManager[Any]:
        return nullcontext()


@dataclass(frozen=True)
class AutocastPrecision(NativePrecision):
    """torch.autocast: the model keeps its dtype, torch picks one for each operation.

    Attributes:
        device_type: "cpu" or "cuda".
        dtype: of operations that are safe in 16 bits.
    """

    average_before_reduce: bool = False
    device_type: str = "cpu"
    dtype: torch.dtype = torch.bfloat16

    def forward_context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device_type, dtype=self.dtype)


@dataclass(frozen=True)
class MixedPrecision:
    """Forward and backward in 16 bits, sums and updates in fp32 (Micikevicius et al., 2018).

    Attributes:
        dtype: of model weights: bfloat16 or float16.
        input_casting: cast floating-point inputs as well.
    """

    dtype: torch.dtype
    scaler: LossScaler = NO_SCALER
    input_casting: bool = True
    average_before_reduce: bool = False
    grad_dtype_override: torch.dtype | None = None

    def model_dtype(self, original: torch.dtype) -> torch.dtype:
        return self.dtype if original.is_floating_point else original

    def main_dtype(self, original: torch.dtype) -> torch.dtype:
        return torch.float32

    def grad_dtype(self, original: torch.dtype) -> torch.dtype:
        return self.grad_dtype_override or torch.float32

    def main_weights(self, original: Tensor, model_weights: Tensor) -> Tensor:
        return original.to(torch.float32, copy=True)

    def copy_to_model(self, main_weights: Tensor, model_weights: Tensor) -> None:
        model_weights.copy_(main_weights)

    def cast_inputs(self, value: Any) -> Any:
        if not self.input_casting:
            return value
        return map_tensors(value, lambda x: x.to(self.dtype) if x.is_floating_point() else x)

    def forward_context(self) -> AbstractContextManager[Any]:
        return nullcontext()


_CONFIG_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


# As torch's GradScaler: no hysteresis and a longer window. GradScaler has no minimum, but below 1
# it is not the scale that makes gradients overflow.
_AUTOCAST_RULES = DynamicScaleRules(window=2000, hysteresis=1)


def choose_precision(config: EngineConfig, device: torch.device) -> Precision:
    """The precision policy of a run; config parsing has refused unsupported combinations."""
    autocast = config.torch_autocast
    grad_dtype = torch_dtype(config.data_types.grad_accum_dtype)
    if config.fp16.enabled:
        scaler, casts = _make_scaler(config.fp16), config.fp16.auto_cast
        return MixedPrecision(
            torch.float16, scaler, input_casting=casts, grad_dtype_override=grad_dtype
        )
    if config.bf16.enabled:
        return MixedPrecision(torch.bfloat16, grad_dtype_override=grad_dtype)
    if autocast.enabled:
        return replace(
            _make_autocast(_CONFIG_DTYPES[autocast.dtype], device),
            grad_dtype_override=grad_dtype,
        )
    return NativePrecision(grad_dtype_override=grad_dtype)


def torch_dtype(name: str | None) -> torch.dtype | None:
    """The torch dtype of a name in the config; None for None."""
    return None if name is None else _CONFIG_DTYPES[name]


def _make_autocast(dtype: torch.dtype, device: torch.device) -> AutocastPrecision:
    if dtype is torch.float16:
        scaler = DynamicScaler(_AUTOCAST_RULES)
        return AutocastPrecision(scaler, device_type=device.type, dtype=dtype)
    return AutocastPrecision(device_type=device.type, dtype=dtype)


def _make_scaler(fp16: Fp16Config) -> LossScaler:
    if fp16.loss_scale:
        return FixedScaler(fp16.loss_scale)
    return DynamicScaler(
        DynamicScaleRules(
            initial=2.0**fp16.initial_scale_power,
            window=fp16.loss_scale_window,
            hysteresis=fp16.hysteresis,
            consecutive=fp16.consecutive_hysteresis,
            minimum=fp16.min_loss_scale,
        )
    )


def clamp_to_dtype(value: float, dtype: torch.dtype) -> float:
    """`value`, or infinity if it is out of the dtype's range, which torch refuses to fill with."""
    return value if abs(value) <= torch.finfo(dtype).max else math.copysign(math.inf, value)


def post_reduce_scale(
    micro_steps: int,
    world_size: int,
    *,
    average_before_reduce: bool,
    prescale: bool,
    predivide: float,
) -> float:
    """Factor for reduced gradients; the initial gradient of backward has the rest of the average.

    Dividing before or after the sum over ranks is the same in exact arithmetic and free either way.
    In 16 bits, small gradients divided before may underflow, large ones divided after may overflow.

    Args:
        average_before_reduce: see `Precision`.
        prescale: divide by the number of ranks before the sum (`prescale_gradients`).
        predivide: divide by this before the sum and by the rest after it
            (`gradient_predivide_factor`). As in DeepSpeed, `prescale` takes precedence.

    Raises:
        ConfigError: `predivide` is not positive.
    """
    if predivide <= 0.0:
        raise ConfigError(
            f"gradient_predivide_factor is {predivide:g}",
            allowed="a number greater than 0; 1 turns it off",
        )
    if average_before_reduce and (prescale or predivide == 1.0):
        return 1.0
    over_steps = 1.0 if average_before_reduce else 1.0 / micro_steps
    if prescale:
        return over_steps
    return over_steps * predivide / world_size
