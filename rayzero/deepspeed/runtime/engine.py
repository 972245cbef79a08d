"""`deepspeed.runtime.engine`."""

from __future__ import annotations

from rayzero.engine.api.deepspeed_engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
