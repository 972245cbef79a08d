"""`deepspeed.utils.groups`: one data parallel group of all ranks; all others have one rank.

Getters such as `_get_sequence_parallel_rank` are derived from their names, which state a group and
what to return of it.
"""

from __future__ import annotations

from collections.abc import Callable
from re import fullmatch
from typing import Any

from rayzero.deepspeed.comm import get_rank, get_world_group, get_world_size
from rayzero.engine.comm.process_group import one_rank_group
from rayzero.engine.errors import ConfigError

# The group of all ranks is None before `init_distributed`, which torch reads as all ranks.
_OF_ALL: dict[str, Callable[[], Any]] = {
    "group": get_world_group,
    "rank": get_rank,
    "world_size": get_world_size,
    "group_ranks": lambda: list(range(get_world_size())),
    "group_dict": dict,
}
_OF_ONE: dict[str, Callable[[], Any]] = {
    "group": one_rank_group,
    "rank": lambda: 0,
    "world_size": lambda: 1,
    "src_rank": get_rank,  # the rank itself, in a group of one
    "group_dict": dict,
}


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Does nothing. Raises ConfigError for expert or model parallelism."""
    if ep_size != 1 or mpu is not None:
        raise ConfigError(
            f"deepspeed.utils.groups.initialize(ep_size={ep_size}, mpu={mpu!r:.100}) was called",
            allowed="ep_size=1, mpu=None: all ranks are data parallel",
        )


def __getattr__(name: str) -> Callable[..., Any]:
    """Returns a getter, which accepts the name of an expert group."""
    found = fullmatch(r"_?get_(\w*data|model|tensor_model|sequence|expert)_parallel_(\w+)", name)
    table = _OF_ALL if found and found[1].endswith("data") else _OF_ONE
    if not found or found[2] not in table:
        raise AttributeError(name)
    read = table[found[2]]
    return lambda *group_name: read()
