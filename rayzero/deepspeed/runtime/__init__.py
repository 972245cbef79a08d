"""`deepspeed.runtime`: names that scripts import from DeepSpeed's inner rooms."""

from __future__ import annotations

from rayzero.deepspeed.runtime import lr_schedules, zero

__all__ = ["lr_schedules", "zero"]
