"""Finds or creates the default process group, and makes its backend and device.

`init_distributed` is DeepSpeed's function of that name.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from rayzero.engine.comm.backend import Backend, Work, copy_unless_same
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.comm.elastic_group import ElasticGroup, elastic_group
from rayzero.engine.comm.gloo_p2p import destroy_at_exit
from rayzero.engine.comm.nccl import NcclBackend
from rayzero.engine.comm.shared_memory import make_gloo_backend
from rayzero.engine.device import get_device, local_device
from rayzero.engine.errors import ConfigError
from rayzero.engine.torch_private import HashStore

log = logging.getLogger("rayzero.engine")

T = TypeVar("T")
DEFAULT_TIMEOUT = timedelta(minutes=30)
_RENDEZVOUS_VARIABLES = {"RANK", "WORLD_SIZE", "MASTER_ADDR"}


class SingleRankBackend(Backend):
    """The backend of a single rank without a process group. Collectives complete at once."""

    rank = 0
    world_size = 1

    def all_reduce(self, full: Tensor) -> Work:
        return Work()

    def reduce_scatter(self, full: Tensor, out: Tensor, *, accumulate: bool) -> Work:
        if accumulate:
            out.add_(full)
        else:
            copy_unless_same(out, full)
        return Work()

    def _copy(self, full: Tensor, part: Tensor, *_: Any, **__: Any) -> Work:
        copy_unless_same(full, part)
        return Work()

    all_gather = all_gather_in_group = gather = _copy

    def all_to_all(self, full: Tensor, received: Tensor) -> Work:
        received.copy_(full)
        return Work()

    def all_to_all_v(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Work:
        received[0].copy_(sent[0])
        return Work()

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return Work()


class LateBackend(SingleRankBackend):
    """A backend over all ranks of the present group that connects at the first collective.

    The ranks come to the first collective together, but they may build an engine, or adapt it to
    other ranks, at different times. Buffers made by `zeros` are not shared with other ranks.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    @cached_property
    def _connected(self) -> Backend:
        return connect_backend()[0]

    def all_reduce(self, full: Tensor) -> Work:
        return self._connected.all_reduce(full)

    def gather(self, full: Tensor, part: Tensor, target: int) -> Work:
        return self._connected.gather(full, part, target)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._connected.broadcast(tensor, source)


def all_gather_objects(value: T) -> list[T]:
    """Returns each rank's picklable value, by rank. Uses the default process group, for values to
    agree on before there is an engine. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast_object(value: Any, source: int) -> Any:
    """Returns the picklable value of rank `source`, over the default process group. Collective."""
    values = [value]
    dist.broadcast_object_list(values, source)
    return values[0]


def group_size() -> int:
    """Returns the number of ranks of the default process group, or 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def connect_backend() -> tuple[Backend, torch.device]:
    """Returns the backend over all ranks, and this rank's device.

    Uses the default process group if it exists (Ray Train and a rayzero worker create it), creates
    it under torchrun, and otherwise runs on this rank alone. CPU ranks on one host exchange data
    through shared memory unless RAYZERO_SHARED_MEMORY=0. Raises ConfigError if the group's backend
    is neither nccl nor gloo.

    Collective on gloo, where all ranks must agree on whether they share memory.
    """
    if (elastic := elastic_group()) is not None:
        return _connect_to_generation(elastic)
    if not dist.is_initialized() and os.environ.keys() >= _RENDEZVOUS_VARIABLES:
        create_group(get_device(local_device()).backend)
        destroy_at_exit()
    if not dist.is_initialized():
        return SingleRankBackend(), _make_current(local_device())
    group = dist.group.WORLD
    name = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl" if none was requested
    nccl = "nccl" in name
    if not nccl and "gloo" not in name:
        raise ConfigError(f"the process group's backend is {name!r}", allowed="nccl, gloo")
    # A worker or the script may have bound the group to another device than that of LOCAL_RANK.
    bound = getattr(group, "bound_device_id", None)
    device = _make_current((bound or local_device()) if nccl else torch.device("cpu"))
    if group is None or dist.get_world_size() == 1:
        return SingleRankBackend(), device
    return _connect_to_group(group, nccl=nccl), device


def _connect_to_generation(elastic: ElasticGroup) -> tuple[Backend, torch.device]:
    place = elastic.place
    device = _make_current(local_device() if place is None else place.device)
    if place is None or place.world_size == 1:
        return SingleRankBackend(), device
    return _connect_to_group(elastic.get_group(), nccl="nccl" in place.backend), device


def _connect_to_group(group: dist.ProcessGroup, *, nccl: bool) -> Backend:
    if nccl:
        return NcclBackend(group)
    shares_memory = os.environ.get("RAYZERO_SHARED_MEMORY", "1") != "0"
    return make_gloo_backend(group, share_memory=shares_memory)


def connect_collectives() -> Collectives:
    """Returns new collectives over all ranks. See `connect_backend`."""
    return Collectives(*connect_backend())


def connect_alone() -> Collectives:
    """Does `connect_collectives` without waiting for the other ranks, which may be busy elsewhere.
    The collectives are `detached` until `Collectives.reconnect`."""
    collectives = Collectives(LateBackend(), _make_current(local_device()))
    collectives.detached = collectives.in_step = True
    return collectives


def _make_current(device: torch.device) -> torch.device:
    get_device(device).make_current()
    return device


def create_group(backend: str, **options: Any) -> None:
    """Creates the default process group. An NCCL group is bound to this rank's device, which is
    made current first. Its communicator is then created at once, so that subgroups can be split
    from it."""
    device = _make_current(local_device()) if backend == "nccl" else None
    dist.init_process_group(backend, device_id=device, **options)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta = DEFAULT_TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Creates the default process group, unless it exists. It has torchrun's ranks, or this rank
    alone.

    Args:
        dist_backend: nccl or gloo. By default nccl if there are GPUs.
        auto_mpi_discovery, config: ignored. Ranks are read from the environment (torchrun, a
            rayzero job), or from `init_method`, `rank` and `world_size`.
        distributed_port: MASTER_PORT, if the environment has none.
        verbose: log the group on rank 0.
        timeout: the timeout of collectives.
        init_method, rank, world_size: see `init_process_group`. -1 for the environment's value.
        dist_init_required: False if the script has created the group.

    Raises:
        ConfigError: the backend is neither nccl nor gloo, or `dist_init_required` is False and
            there is no group.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise ConfigError(
            "dist_init_required=False was given, and there is no process group",
            fix="leave it out, or call torch.distributed.init_process_group before",
        )
    backend = dist_backend or get_device(local_device()).backend
    if backend not in ("nccl", "gloo"):
        raise ConfigError(
            f"the backend {backend!r}", allowed="nccl, gloo", fix="change dist_backend"
        )
    if init_method is not None:
        place = {"init_method": init_method, "rank": rank, "world_size": world_size}
        create_group(backend, timeout=timeout, **place)
    elif os.environ.keys() >= _RENDEZVOUS_VARIABLES:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
        create_group(backend, timeout=timeout)
    else:
        alone = HashStore()
        create_group(backend, store=alone, rank=0, world_size=1, timeout=timeout)
    destroy_at_exit()
    if verbose and dist.get_rank() == 0:
        log.info("process group: %s, %d ranks", backend, dist.get_world_size())


_one_rank_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by the group of all ranks


def one_rank_group() -> Any:
    """Returns a group of this rank alone, made on first use. None without a process group. Not
    collective: ranks need not call this at the same time."""
    if not dist.is_initialized():
        return None
    elastic = elastic_group()
    world = dist.group.WORLD if elastic is None else elastic.place
    if world not in _one_rank_groups:
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        _one_rank_groups[world] = group
    return _one_rank_groups[world]
