"""`deepspeed.runtime.zero`: the same as `deepspeed.zero`."""

from __future__ import annotations

from rayzero.engine.api.params import GatheredParameters, Init

__all__ = ["GatheredParameters", "Init"]
