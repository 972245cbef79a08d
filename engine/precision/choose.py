"""Which precision a config asks for. `factory` calls it, and nothing else does."""

from __future__ import annotations

from dataclasses import replace

import torch

from rayzero.engine.config import EngineConfig
from rayzero.engine.config.precision import Fp16Config
from rayzero.engine.precision.loss_scale import DynamicRules, DynamicScale, FixedScale, Scaler
from rayzero.engine.precision.policy import Autocast, Mixed, Native, Precision

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# torch's GradScaler: no hysteresis, and a longer way up. It has no minimum, but below 1 it is not
# the scale that makes gradients overflow.
_AUTOCAST_RULES = DynamicRules(window=2000, hysteresis=1)


def choose_precision(config: EngineConfig, device: torch.device) -> Precision:
    """The precision of a run; what cannot be had is refused when the config is read."""
    autocast = config.torch_autocast
    accumulate_in = dtype_of(config.data_types.grad_accum_dtype)
    if config.fp16.enabled:
        scaler, casts = _scaler(config.fp16), config.fp16.auto_cast
        return Mixed(torch.float16, scaler, casts_inputs=casts, accumulate_in=accumulate_in)
    if config.bf16.enabled:
        return Mixed(torch.bfloat16, accumulate_in=accumulate_in)
    if autocast.enabled:
        return replace(_autocast(_DTYPES[autocast.dtype], device), accumulate_in=accumulate_in)
    return Native(accumulate_in=accumulate_in)


def dtype_of(name: str | None) -> torch.dtype | None:
    """The torch dtype of a config's name for it; None for None."""
    return None if name is None else _DTYPES[name]


def _autocast(dtype: torch.dtype, device: torch.device) -> Autocast:
    if dtype is torch.float16:
        scaler = DynamicScale(_AUTOCAST_RULES)
        return Autocast(scaler, device_type=device.type, dtype=dtype)
    return Autocast(device_type=device.type, dtype=dtype)


def _scaler(fp16: Fp16Config) -> Scaler:
    if fp16.loss_scale:
        return FixedScale(fp16.loss_scale)
    return DynamicScale(
        DynamicRules(
            initial=2.0**fp16.initial_scale_power,
            window=fp16.loss_scale_window,
            hysteresis=fp16.hysteresis,
            consecutive=fp16.consecutive_hysteresis,
            minimum=fp16.min_loss_scale,
        )
    )
