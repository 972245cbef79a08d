"""`deepspeed.runtime.zero.partition_parameters`."""

from __future__ import annotations

from rayzero.deepspeed.zero import GatheredParameters, Init

__all__ = ["GatheredParameters", "Init"]
