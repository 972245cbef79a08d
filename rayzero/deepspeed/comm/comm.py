"""`deepspeed.comm.comm`: the same as `deepspeed.comm`."""

from __future__ import annotations

from typing import Any

from rayzero.deepspeed import comm
from rayzero.engine.comm.process_group import init_distributed

__all__ = ["init_distributed"]


def __getattr__(name: str) -> Any:
    return getattr(comm, name)
