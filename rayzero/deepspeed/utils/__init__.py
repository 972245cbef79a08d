"""`deepspeed.utils`."""

from __future__ import annotations

from typing import Any

from rayzero.deepspeed.refused import unsupported_message
from rayzero.deepspeed.utils.logging import log_dist, logger
from rayzero.deepspeed.utils.repeating import RepeatingLoader
from rayzero.engine.api.tensor_fragments import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)

__all__ = [
    "RepeatingLoader",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(unsupported_message(f"deepspeed.utils.{name}", __all__))
