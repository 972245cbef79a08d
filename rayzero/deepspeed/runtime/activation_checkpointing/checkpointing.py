"""`deepspeed.runtime.activation_checkpointing.checkpointing`."""

from __future__ import annotations

from rayzero.engine.api.activation_checkpointing import (
    checkpoint,
    configure,
    is_configured,
    non_reentrant_checkpoint,
    reset,
)

__all__ = ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"]
