"""`deepspeed.accelerator.real_accelerator`."""

from __future__ import annotations

from rayzero.deepspeed.accelerator.device import get_accelerator

__all__ = ["get_accelerator"]
