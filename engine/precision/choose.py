"""Which precision a config asks for. `factory` calls it, and nothing else does."""

from __future__ import annotations

from dataclasses import replace

import torch

from rayzero.engine.config import EngineConfig
from rayzero.engine.config.precision import Fp16Config
from rayzero.engine.errors import ConfigError
from rayzero.engine.precision.loss_scale import DynamicRules, DynamicScale, FixedScale, Scaler
from rayzero.engine.precision.policy import Autocast, Mixed, Native, Precision

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_LARGEST_POWER = 64  # far beyond what any gradient survives
# torch's GradScaler: no hysteresis, and a longer way up. It has no minimum, but below 1 it is not
# the scale that makes gradients overflow.
_AUTOCAST_RULES = DynamicRules(window=2000, hysteresis=1)


def choose_precision(config: EngineConfig, device: torch.device) -> Precision:
    """The precision of a run.

    Raises:
        ConfigError: more than one precision is enabled, or a loss scale is out of range.
    """
    autocast = config.torch_autocast
    enabled = {
        "fp16": config.fp16.enabled,
        "bf16": config.bf16.enabled,
        "torch_autocast": autocast.enabled,
    }
    asked = [name for name, on in enabled.items() if on]
    if len(asked) > 1:
        raise ConfigError(
            f"{' and '.join(asked)} are both enabled",
            allowed="one of fp16, bf16 and torch_autocast",
            fix='"enabled": false in the others',
        )
    accumulate_in = _accumulation(config)
    if config.fp16.enabled:
        scaler, casts = _scaler(config.fp16), config.fp16.auto_cast
        return Mixed(torch.float16, scaler, casts_inputs=casts, accumulate_in=accumulate_in)
    if config.bf16.enabled:
        return Mixed(torch.bfloat16, accumulate_in=accumulate_in)
    if autocast.enabled:
        return replace(_autocast(dtype_of(autocast.dtype), device), accumulate_in=accumulate_in)
    return Native(accumulate_in=accumulate_in)


def dtype_of(name: str | None) -> torch.dtype | None:
    """The torch dtype of a config's name for it; None for None."""
    return None if name is None else _DTYPES[name]


def _accumulation(config: EngineConfig) -> torch.dtype | None:
    dtype = dtype_of(config.data_types.grad_accum_dtype)
    if dtype is torch.float16 and not config.fp16.enabled:
        raise ConfigError(
            "data_types.grad_accum_dtype is fp16 without fp16: without a loss scale, gradients "
            "below 6e-8 would vanish",
            allowed="fp32 or bf16; fp16 with fp16.enabled",
        )
    return dtype


def _autocast(dtype: torch.dtype | None, device: torch.device) -> Autocast:
    if dtype not in (torch.float16, torch.bfloat16):
        raise ConfigError(
            f"torch_autocast.dtype is {dtype}",
            allowed="bfloat16 or float16",
            fix="torch_autocast.dtype, or torch_autocast.enabled: false for fp32",
        )
    if dtype is torch.float16:
        scaler = DynamicScale(_AUTOCAST_RULES)
        return Autocast(scaler, device_type=device.type, dtype=dtype)
    return Autocast(device_type=device.type, dtype=dtype)


def _scaler(fp16: Fp16Config) -> Scaler:
    if fp16.loss_scale:
        return FixedScale(fp16.loss_scale)
    power = fp16.initial_scale_power
    if abs(power) > _LARGEST_POWER:
        raise ConfigError(
            f"fp16.initial_scale_power is {power}",
            allowed=f"from {-_LARGEST_POWER} to {_LARGEST_POWER}",
        )
    if not fp16.min_loss_scale:
        raise ConfigError(
            "fp16.min_loss_scale is 0: a scale that is halved for ever never gets there",
            allowed="more than 0",
        )
    return DynamicScale(
        DynamicRules(
            initial=2.0**power,
            window=fp16.loss_scale_window,
            hysteresis=fp16.hysteresis,
            consecutive=fp16.consecutive_hysteresis,
            minimum=fp16.min_loss_scale,
        )
    )
