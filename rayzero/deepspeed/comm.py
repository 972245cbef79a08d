"""`deepspeed.comm`: torch.distributed, and a few names that torch.distributed does not have.

The script's collectives use this module; the engine's go through `engine/comm`.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

import torch.distributed as dist

from rayzero.deepspeed.lookup import REFUSED, resolve
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
    """Returns this rank's number; 0 without a process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Returns the number of ranks; 1 without a process group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_local_rank() -> int:
    """Returns this rank's number on its node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> Any:
    return dist.group.WORLD


def is_initialized() -> bool:
    """Returns whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def get_all_ranks_from_group(group: dist.ProcessGroup | None = None) -> list[int]:
    """Returns the ranks of a group, by default all ranks."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def get_global_rank(group: dist.ProcessGroup | None = None, group_rank: int = 0) -> int:
    """Returns the global rank of a rank in a group."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


_OTHER_NAMES = {
    "allgather_fn": "all_gather_into_tensor",
    "reduce_scatter_fn": "reduce_scatter_tensor",
    "inference_all_reduce": "all_reduce",
}
"""{DeepSpeed's function: torch's function}."""


_COMPARED_BY_TORCH = ("isend", "irecv")
"""Functions that must stay torch's own, because `P2POp` compares them."""


def _without_logging(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a collective that also accepts DeepSpeed's options for its log of collectives."""

    @wraps(function)
    def call(
        *args: Any, prof: bool = False, log_name: str = "", debug: str = "", **options: Any
    ) -> Any:
        return function(*args, **options)

    return call


def __getattr__(name: str) -> Any:
    if name == "cdb":  # DeepSpeed's backend, None before init_distributed
        return sys.modules[__name__] if is_initialized() else None
    if name == "default_pg_timeout":  # read from the environment at each access
        return timedelta(minutes=int(os.getenv("DEEPSPEED_TIMEOUT", "10")))
    name = _OTHER_NAMES.get(name, name)
    if name.startswith("_") or not hasattr(dist, name) or name in REFUSED["comm"]:
        return resolve("comm", name)
    value = getattr(dist, name)
    if inspect.isfunction(value) and name not in _COMPARED_BY_TORCH:
        return _without_logging(value)
    return value
