"""Process groups as a rayzero worker makes and ends them, without Ray and without a controller."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu.report import Settings
from rayzero.workers.messages import Assignment
from rayzero.workers.nccl_settings import apply_nccl_settings
from rayzero.workers.process_group import (
    SocketTracker,
    abort_default_group,
    interrupt_collectives,
    join_process_group,
)
from rayzero.workers.rendezvous_store import open_store

JOIN_S = 60.0
HOST = "127.0.0.1"


@dataclass
class Member:
    """A rank of the group of one generation."""

    assignment: Assignment
    device: torch.device
    sockets: SocketTracker

    def join(self) -> None:
        apply_nccl_settings(os.environ)
        join_process_group(self.assignment, self.device, JOIN_S, self.sockets)

    def interrupt(self) -> None:
        """As the thread that serves the controller does."""
        interrupt_collectives(self.device, self.sockets)

    def abort(self) -> None:
        """As the training thread does when it has left the training function."""
        abort_default_group(self.device, self.sockets)


def make_member(
    settings: Settings, generation: int, rank: int = 0, world_size: int = 1, port: int = 0
) -> tuple[Member, object]:
    """A rank that has not joined, and what must live as long as its group.

    Args:
        port: of the store that another rank serves; 0 serves one here.
    """
    served = open_store(HOST, JOIN_S) if not port else None
    assignment = Assignment(
        rank=rank,
        local_rank=rank,
        local_world_size=world_size,
        vault="",
        generation=generation,
        world_size=world_size,
        store_host=HOST,
        store_port=served.port if served is not None else port,
        secret=b"0" * 32,
    )
    number = rank % torch.cuda.device_count() if settings.on_gpu else 0
    device = torch.device(settings.device, number)
    return Member(assignment, device, SocketTracker()), served


def sum_of_ranks(device: torch.device) -> float:
    """An all-reduce of every rank's number plus one, read by the host."""
    total = torch.full((1024,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(total)
    return float(total[0].item())


def count_resources(settings: Settings) -> dict[str, int]:
    """Of this process: threads, descriptors; of the GPU: bytes in use by all processes."""
    counts = {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir(Path("/proc/self/fd"))),
    }
    if settings.on_gpu:
        free, total = torch.cuda.mem_get_info()
        counts["gpu_bytes"] = total - free
    return counts
