"""`deepspeed.ops`: optimizers."""

from __future__ import annotations

from rayzero.deepspeed.ops import adam

__all__ = ["adam"]
