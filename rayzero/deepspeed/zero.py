"""`deepspeed.zero`."""

from __future__ import annotations

from typing import Any

from rayzero.deepspeed.refused import no_such
from rayzero.engine.api.gathered import GatheredParameters, Init

__all__ = ["GatheredParameters", "Init"]


def __getattr__(name: str) -> Any:
    raise AttributeError(no_such(f"deepspeed.zero.{name}", __all__))
