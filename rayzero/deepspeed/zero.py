"""`deepspeed.zero`."""

from __future__ import annotations

from typing import Any

from rayzero.deepspeed.refused import unsupported_message
from rayzero.engine.api.params import GatheredParameters, Init

__all__ = ["GatheredParameters", "Init"]


def __getattr__(name: str) -> Any:
    raise AttributeError(unsupported_message(f"deepspeed.zero.{name}", __all__))
