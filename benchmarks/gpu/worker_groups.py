"""Process groups as a rayzero worker makes and ends them, without Ray and without a controller."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.report import Settings
from rayzero.workers.group_sockets import SocketTracker
from rayzero.workers.messages import Assignment
from rayzero.workers.nccl_settings import apply_nccl_settings
from rayzero.workers.process_group import (
    abort_default_group,
    interrupt_collectives,
    join_process_group,
    plan_process_group,
)
from rayzero.workers.rendezvous_store import StoreServer

JOIN_S = 60.0
HOST = "127.0.0.1"
GPU_HZ = 1.8e9  # torch.cuda._sleep counts cycles; the clock only has to be about right


@dataclass
class Member:
    """A rank of the group of one generation, and the store that it serves, if it does."""

    assignment: Assignment
    device: torch.device
    sockets: SocketTracker
    store: StoreServer | None

    def join(self) -> None:
        apply_nccl_settings(os.environ)
        plan_process_group(self.assignment, self.device)
        join_process_group(self.assignment, self.device, JOIN_S, self.sockets)

    def interrupt(self) -> None:
        """As the thread that serves the controller does."""
        interrupt_collectives(self.device, self.sockets)

    def abort(self) -> None:
        """As the training thread does when it has left the training function."""
        abort_default_group(self.device, self.sockets)
        if self.store is not None:
            self.store.close()


def make_member(
    settings: Settings, generation: int, rank: int = 0, world_size: int = 1, port: int = 0
) -> Member:
    """A rank that has not joined.

    Args:
        port: of the store that another rank serves; 0 serves one here.
    """
    served = StoreServer(HOST, JOIN_S) if not port else None
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
    if served is not None:
        served.admit(assignment.secret)
    number = rank % torch.cuda.device_count() if settings.on_gpu else 0
    device = torch.device(settings.device, number)
    return Member(assignment, device, SocketTracker(), served)


def use_nccl_like_device(settings: Settings) -> None:
    """Without a GPU: this process's device and groups behave as NCCL's, for the rest of its life.
    The host waits only where it reads; an abort ends that wait, and leaves garbage."""
    if not settings.on_gpu:
        from tests.support.nccl_like.install import install
        from tests.support.nccl_like.settings import NcclLike

        install(NcclLike())


def stall(settings: Settings, seconds: float) -> None:
    """Enqueues a kernel that takes about so long."""
    if settings.on_gpu:
        torch.cuda._sleep(int(seconds * GPU_HZ))
    else:
        _nccl_like_stream().launch(lambda: sleep(seconds))


def poison(settings: Settings) -> None:
    """Enqueues a kernel that fails: the process can use its device no more."""
    if settings.on_gpu:
        torch.zeros(1, device="cuda")[torch.tensor([5], device="cuda")]
    else:
        _nccl_like_stream().poison()


def _nccl_like_stream() -> Any:
    from tests.support.nccl_like.install import installed

    device = installed()
    if device is None:
        raise RuntimeError("use_nccl_like_device was not called")
    return device.stream


def run_as_training_thread(work: Callable[[], None]) -> None:
    """Runs `work` in a thread with the name of a worker's, whose operators the NCCL-like device
    queues. Raises what it raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised by the caller
            errors.append(error)

    thread = Thread(target=run, name="rayzero-train", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


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
