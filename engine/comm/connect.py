"""Finds the process group there is, and the backend and device that go with it."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from rayzero.engine.comm.collectives import Backend, Collectives
from rayzero.engine.comm.gloo import GlooBackend
from rayzero.engine.comm.leaving import destroy_at_exit
from rayzero.engine.comm.local import LocalBackend
from rayzero.engine.comm.nccl import NcclBackend
from rayzero.engine.errors import ConfigError


def connect() -> tuple[Collectives, torch.device]:
    """The way to the other ranks, and the device this rank computes on.

    The default process group is used if there is one (a rayzero worker and Ray Train make it);
    under torchrun it is made here; without either this process is alone. CPU ranks on one host
    exchange through shared memory unless the environment says RAYZERO_SHARED_MEMORY=0.

    Raises:
        ConfigError: the group's backend is neither nccl nor gloo.
    """
    if not dist.is_available():
        return Collectives(LocalBackend()), _device(prefer_cuda=True)
    if not dist.is_initialized() and {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        destroy_at_exit()
    if not dist.is_initialized():
        return Collectives(LocalBackend()), _device(prefer_cuda=True)
    group = dist.group.WORLD
    name = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl", also when none was asked for
    cuda = "nccl" in name
    if not cuda and "gloo" not in name:
        raise ConfigError(f"the process group's backend is {name!r}", allowed="nccl, gloo")
    device = _device(prefer_cuda=cuda)
    if group is None or dist.get_world_size() == 1:
        return Collectives(LocalBackend()), device
    share = os.environ.get("RAYZERO_SHARED_MEMORY", "1") != "0"
    backend: Backend = NcclBackend(group) if cuda else GlooBackend(group, share_memory=share)
    return Collectives(backend), device


def _device(*, prefer_cuda: bool) -> torch.device:
    """This rank's GPU: the one torchrun or the host numbered it for, or the current one."""
    if not (prefer_cuda and torch.cuda.is_available()):
        return torch.device("cpu")
    number = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
    device = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
