"""`deepspeed.runtime.engine`."""

from __future__ import annotations

from rayzero.engine.engine import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
