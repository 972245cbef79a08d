"""`deepspeed.utils.groups`: one data parallel group of all ranks; all others have one rank."""

from __future__ import annotations

from typing import Any

from rayzero.deepspeed.comm import get_rank, get_world_group, get_world_size
from rayzero.engine.comm.process_group import one_rank_group
from rayzero.engine.errors import ConfigError


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Does nothing. Raises ConfigError for expert or model parallelism."""
    if ep_size != 1 or mpu is not None:
        raise ConfigError(
            f"deepspeed.utils.groups.initialize(ep_size={ep_size}, mpu={mpu!r:.100}) was called",
            allowed="ep_size=1, mpu=None: all ranks are data parallel",
        )


def _ranks() -> list[int]:
    return list(range(get_world_size()))


def _first_rank(group: Any = None) -> int:
    return 0


def _one_rank(name: str | None = None) -> Any:
    return one_rank_group()


def _one(name: str | None = None) -> int:
    return 1


def _zero(name: str | None = None) -> int:
    return 0


def _world(name: str | None = None) -> Any:
    """The group of all ranks; None before `init_distributed`, which torch reads as all ranks."""
    return get_world_group()


def _rank(name: str | None = None) -> int:
    return get_rank()


def _size(name: str | None = None) -> int:
    return get_world_size()


def _no_groups() -> dict[str, Any]:
    return {}


get_data_parallel_group = _get_data_parallel_group = _clone_world_group = _world
_get_sequence_data_parallel_group = _get_expert_data_parallel_group = _world
get_data_parallel_rank = _get_data_parallel_rank = _get_sequence_data_parallel_rank = _rank
_get_expert_data_parallel_rank = _rank
get_data_parallel_world_size = _get_data_parallel_world_size = _size
_get_sequence_data_parallel_world_size = _get_expert_data_parallel_world_size = _size
_get_data_parallel_group_ranks = _ranks
_get_broadcast_src_rank = _first_rank

get_model_parallel_group = get_tensor_model_parallel_group = _one_rank
_get_sequence_parallel_group = _get_expert_parallel_group = _one_rank
get_model_parallel_rank = get_tensor_model_parallel_rank = _zero
_get_sequence_parallel_rank = _get_expert_parallel_rank = _zero
get_model_parallel_world_size = get_tensor_model_parallel_world_size = _one
_get_model_parallel_world_size = _get_sequence_parallel_world_size = _one
_get_expert_parallel_world_size = _one
get_tensor_model_parallel_src_rank = get_rank  # the rank itself, in a group of one
_get_expert_parallel_group_dict = _get_expert_data_parallel_group_dict = _no_groups


def _get_max_expert_size() -> int:
    """Raises ConfigError: there are no expert groups."""
    raise ConfigError(
        "deepspeed.utils.groups has no expert parallel group",
        allowed="experts as ordinary modules, on every rank",
    )
