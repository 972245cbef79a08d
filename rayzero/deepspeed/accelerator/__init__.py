"""`deepspeed.accelerator`: this rank's device, for scripts that run on any kind of it."""

from __future__ import annotations

from rayzero.deepspeed.accelerator.device import Accelerator, get_accelerator

__all__ = ["Accelerator", "get_accelerator"]
