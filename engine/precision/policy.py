"""Native, Mixed, Autocast; choice, averaging, input casting.

How main weights relate to model weights. One object a run, chosen in `factory`.

| policy | model weights | main weights | main grads | loss scale |
|---|---|---|---|---|
| Native | the model's own dtype | the same memory | the same dtype | none |
| Mixed, bf16 | bfloat16 | fp32, from the original values | fp32 | none |
| Mixed, fp16 | float16 | fp32, from the original values | fp32 | dynamic or fixed |
| Autocast | the model's own dtype | the same memory | the same dtype | fp16: dynamic |

Main grads have another dtype where `data_types.grad_accum_dtype` says so. Sums over ranks and
micro-steps are rounded to it term by term; the optimizer reads them in the main weights' dtype.

Which precision a config asks for. `factory` calls it, and nothing else does.

Where the average over ranks and micro-steps is taken: before the sum over the ranks, or after.

Both cost nothing: before is a factor of backward's seed, after is a factor in the optimizer. In
exact arithmetic it is the same. In 16 bits it is not: what comes before may vanish, what comes
after may overflow in the sum.

Casts the tensors in whatever is handed to a model.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from rayzero.engine.config import EngineConfig
from rayzero.engine.config.model import Fp16Config
from rayzero.engine.errors import ConfigError
from rayzero.engine.precision.loss_scale import (
    NO_SCALER,
    DynamicScaler,
    DynamicScaleRules,
    FixedScaler,
    LossScaler,
)


def clamp_to_dtype(value: float, dtype: torch.dtype) -> float:
    """`value`, or infinity where the dtype has no such number: torch refuses to fill with it."""
    return value if abs(value) <= torch.finfo(dtype).max else math.copysign(math.inf, value)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its floating-point tensors in `dtype`.

    Looks into mappings, lists, tuples and dataclasses, and keeps their kind. What holds nothing to
    cast is returned itself, and what was given is never changed.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return _cast_mapping(value, dtype)
    if isinstance(value, list | tuple):
        return _cast_sequence(value, dtype)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _cast_dataclass(value, dtype)
    return value


def _cast_mapping(value: Mapping[Any, Any], dtype: torch.dtype) -> Any:
    changed = _cast_items(list(value.items()), dtype)
    if not changed:
        return value
    if not isinstance(value, MutableMapping):
        return {**value, **changed}
    cast = copy.copy(value)  # a subclass may know more than its items
    for key, one in changed.items():  # not `update`, which some of transformers' refuse
        cast[key] = one
    return cast


def _cast_sequence(value: list[Any] | tuple[Any, ...], dtype: torch.dtype) -> Any:
    changed = _cast_items(list(enumerate(value)), dtype)
    if not changed:
        return value
    cast = [changed.get(index, one) for index, one in enumerate(value)]
    make: Callable[..., Any] = type(value)
    return make(*cast) if hasattr(value, "_fields") else make(cast)  # a named tuple has fields


def _cast_dataclass(value: Any, dtype: torch.dtype) -> Any:
    fields = [one.name for one in dataclasses.fields(value) if one.init]
    changed = _cast_items([(name, getattr(value, name)) for name in fields], dtype)
    return dataclasses.replace(value, **changed) if changed else value


def _cast_items(items: list[tuple[Any, Any]], dtype: torch.dtype) -> dict[Any, Any]:
    """What casting makes of the items, as far as it makes anything of them."""
    cast = {key: cast_floats(one, dtype) for key, one in items}
    return {key: cast[key] for key, one in items if cast[key] is not one}


class Precision(Protocol):
    """The dtype decisions of a run.

    Attributes:
        average_first: whether gradients are averaged by the seed of backward, which costs nothing,
            or only when the optimizer uses them, which keeps a weight such as 1/3 from being
            rounded to the precision of the model.
        scaler: what the loss is multiplied by, and gradients are divided by in the optimizer.
    """

    @property
    def average_before_reduce(self) -> bool: ...

    @property
    def scaler(self) -> LossScaler: ...

    def model_dtype(self, original: torch.dtype) -> torch.dtype:
        """The dtype that forward uses a tensor in."""

    def main_dtype(self, original: torch.dtype) -> torch.dtype:
        """The dtype of main weights and optimizer state."""

    def grad_dtype(self, original: torch.dtype) -> torch.dtype:
        """The dtype that main grads rest, travel and are summed in."""

    def main_weights(self, original: Tensor, model_weights: Tensor) -> Tensor:
        """The main weights for a range of model weights; may be the same memory."""

    def copy_to_model(self, main_weights: Tensor, model_weights: Tensor) -> None:
        """After an update: makes the model weights follow the main weights."""

    def cast_inputs(self, value: Any) -> Any:
        """The model's inputs in the dtype of its weights."""

    def forward_context(self) -> AbstractContextManager[Any]:
        """What the model's forward runs in."""


@dataclass(frozen=True)
class NativePrecision:
    """The model trains in the dtype it came in. Model weights and main weights are one tensor."""

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
    """The model keeps its dtype; torch picks one for each operation of forward, and its gradient.

    Attributes:
        device_type: "cpu" or "cuda".
        dtype: of the operations that are safe in 16 bits.
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
        casts_inputs: whether floating-point inputs are cast as well.
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
        return cast_floats(value, self.dtype) if self.input_casting else value

    def forward_context(self) -> AbstractContextManager[Any]:
        return nullcontext()


_CONFIG_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


# torch's GradScaler: no hysteresis, and a longer way up. It has no minimum, but below 1 it is not
# the scale that makes gradients overflow.
_AUTOCAST_RULES = DynamicScaleRules(window=2000, hysteresis=1)


def choose_precision(config: EngineConfig, device: torch.device) -> Precision:
    """The precision of a run; what cannot be had is refused when the config is read."""
    autocast = config.torch_autocast
    accumulate_in = torch_dtype(config.data_types.grad_accum_dtype)
    if config.fp16.enabled:
        scaler, casts = _make_scaler(config.fp16), config.fp16.auto_cast
        return MixedPrecision(
            torch.float16, scaler, input_casting=casts, grad_dtype_override=accumulate_in
        )
    if config.bf16.enabled:
        return MixedPrecision(torch.bfloat16, grad_dtype_override=accumulate_in)
    if autocast.enabled:
        return replace(
            _make_autocast(_CONFIG_DTYPES[autocast.dtype], device),
            grad_dtype_override=accumulate_in,
        )
    return NativePrecision(grad_dtype_override=accumulate_in)


def torch_dtype(name: str | None) -> torch.dtype | None:
    """The torch dtype of a config's name for it; None for None."""
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


def post_reduce_scale(
    micro_steps: int, world_size: int, *, average_first: bool, prescale: bool, predivide: float
) -> float:
    """What summed gradients are to be multiplied by; backward's seed has the rest.

    Args:
        average_first: see `Precision`.
        prescale: divide by the ranks before the sum, as `prescale_gradients` asks.
        predivide: divide by this before the sum and by the rest after it, as
            `gradient_predivide_factor` asks. As in DeepSpeed `prescale` overrules it.

    Raises:
        ConfigError: nothing can be divided by it.
    """
    if predivide <= 0.0:
        raise ConfigError(
            f"gradient_predivide_factor is {predivide:g}", allowed="more than 0; 1 for no division"
        )
    if average_first and (prescale or predivide == 1.0):
        return 1.0
    over_steps = 1.0 if average_first else 1.0 / micro_steps
    if prescale:
        return over_steps
    return over_steps * predivide / world_size
