"""`deepspeed.runtime.dataloader`."""

from __future__ import annotations

from rayzero.deepspeed.utils.repeating import RepeatingLoader

__all__ = ["RepeatingLoader"]
