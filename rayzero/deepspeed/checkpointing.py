"""`deepspeed.checkpointing`: activation checkpointing."""

from __future__ import annotations

from typing import Any

from rayzero.deepspeed.refused import unsupported_message
from rayzero.engine.api.activation_checkpointing import (
    checkpoint,
    configure,
    is_configured,
    non_reentrant_checkpoint,
    reset,
)

__all__ = ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"]


def __getattr__(name: str) -> Any:
    raise AttributeError(unsupported_message(f"deepspeed.checkpointing.{name}", __all__))
