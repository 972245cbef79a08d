"""Makes the default process group where a script asks for it, as DeepSpeed's scripts do."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rayzero.engine.comm.leaving import destroy_at_exit
from rayzero.engine.errors import ConfigError

log = logging.getLogger("rayzero.engine")

TIMEOUT = timedelta(minutes=30)
_PLACES = {"RANK", "WORLD_SIZE", "MASTER_ADDR"}


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta = TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """The default process group, unless there is one: of torchrun's ranks, or of this one alone.

    Args:
        dist_backend: nccl or gloo; by default nccl where there are GPUs.
        auto_mpi_discovery, config: of no use: ranks come from the environment (torchrun, a
            rayzero job), or from `init_method`, `rank` and `world_size`.
        distributed_port: where ranks meet, if the environment does not say.
        verbose: log it on rank 0.
        timeout: of collectives.
        init_method, rank, world_size: as torch's; -1: from the environment.
        dist_init_required: False: there must be a group already.

    Raises:
        ConfigError: the backend is another one; there is no group, and none is to be made.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise ConfigError(
            "dist_init_required=False was given, and there is no process group",
            fix="leave it out, or call torch.distributed.init_process_group before",
        )
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend not in ("nccl", "gloo"):
        raise ConfigError(f"the backend {backend!r}", allowed="nccl, gloo", fix="dist_backend")
    if init_method is not None:
        dist.init_process_group(
            backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size
        )
    elif os.environ.keys() >= _PLACES:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
        dist.init_process_group(backend, timeout=timeout)
    else:
        alone = torch._C._distributed_c10d.HashStore()
        dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=timeout)
    destroy_at_exit()
    if verbose and dist.get_rank() == 0:
        log.info("process group: %s, %d ranks", backend, dist.get_world_size())
