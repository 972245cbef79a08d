"""`deepspeed.runtime.zero`: the same as `deepspeed.zero`."""

from __future__ import annotations

from rayzero.deepspeed.zero import GatheredParameters, Init

__all__ = ["GatheredParameters", "Init"]
