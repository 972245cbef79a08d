"""Generations of the default process group: how a worker meets its peers, and how it leaves them.

One process group lives at a time. Every generation has its own prefix in the store, so that a
late key of an old one cannot be read by a new one.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import _abort_process_group, _world

from rayzero.workers.connections import Connections
from rayzero.workers.messages import Assign


def open_store(timeout_s: float) -> TCPStore:
    """Serves a store on a free port of this host, for as long as the returned object lives."""
    return TCPStore(
        "0.0.0.0",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def join(assign: Assign, device: torch.device, timeout_s: float, connections: Connections) -> None:
    """Makes the default process group of a generation; returns when every member is there.

    The environment is set as torchrun sets it, for scripts that look there.

    Raises:
        RuntimeError: a peer did not come within `timeout_s`, which is also the timeout of every
            collective of the group.
    """
    os.environ.update(
        RANK=str(assign.rank),
        WORLD_SIZE=str(assign.world_size),
        LOCAL_RANK=str(assign.local_rank),
        LOCAL_WORLD_SIZE=str(assign.local_world_size),
        MASTER_ADDR=assign.store_host,
        MASTER_PORT=str(assign.store_port),
    )
    timeout = timedelta(seconds=timeout_s)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)  # a thread's own setting: we are in the training thread
    # Groups are named by their number, which a join that was broken off has used up; a peer that
    # had not come so far would then wait for one of another name.
    _world.group_count = 0
    with connections.noting():
        store = TCPStore(
            assign.store_host,
            assign.store_port,
            is_master=False,
            wait_for_workers=False,
            timeout=timeout,
        )
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=PrefixStore(f"generation-{assign.generation}", store),
            rank=assign.rank,
            world_size=assign.world_size,
            timeout=timeout,
            device_id=device if on_gpu else None,
        )


def abort(connections: Connections) -> None:
    """Ends the default group, if there is one, without waiting for anybody.

    The peers' collectives fail at once, because their connections to this rank close. Called when
    no thread is in a collective any more.
    """
    connections.cut()
    if dist.is_available() and dist.is_initialized():
        _abort_process_group()


def break_off(connections: Connections) -> None:
    """Ends the wait for peers that the training thread may be in; from another thread."""
    connections.cut()
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "nccl":
        _abort_process_group()


def is_collective_failure(error: BaseException) -> bool:
    """Whether `error` is torch telling that a peer is gone or late, not a mistake in user code."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo/" in text or "NCCL" in text)
