"""`deepspeed.comm`: torch.distributed, and a few names that it does not have.

For the script's collectives; the engine's go through `engine/comm`.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from rayzero.deepspeed.lookup import resolve
from rayzero.engine.comm.process_group import init_distributed

__all__ = [
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "init_distributed",
    "is_initialized",
]


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """This rank's number; 0 without a group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Ranks; 1 without a group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_local_rank() -> int:
    """This rank's number on its node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> Any:
    return dist.group.WORLD


def is_initialized() -> bool:
    """Whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def __getattr__(name: str) -> Any:
    if not name.startswith("_") and hasattr(dist, name):
        return getattr(dist, name)
    return resolve("comm", name)
