"""Puts the NCCL-like device and backend into a process, before its first generation.

The product chooses its NCCL paths by itself, from the device that it finds (`replace_device`).
Patched is only what is torch's: reads of CPU tensors that torch does not dispatch, and the
operators of the product's threads, which are queued.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from rayzero.engine.device import replace_device
from tests.support.nccl_like.group import NcclLikeGroup
from tests.support.nccl_like.settings import NcclLike, from_environment
from tests.support.nccl_like.stream import VirtualDevice

_installed: list[VirtualDevice] = []
_FOREVER = ExitStack()
_HOST_THREADS = ("prefetch", "vault", "liveness", "fence")
"""Of the product's, those that only touch host memory."""


def install_from_environment() -> None:
    settings = from_environment()
    if settings is not None:
        install(settings)


def installed() -> VirtualDevice | None:
    return _installed[0] if _installed else None


def install(settings: NcclLike) -> VirtualDevice:
    """For the rest of the process; a second time it does nothing."""
    if _installed:
        return _installed[0]
    device = VirtualDevice(settings)
    _installed.append(device)
    _FOREVER.enter_context(replace_device(device))
    dist.Backend.register_backend(
        "nccl_like",
        lambda store, rank, size, timeout: NcclLikeGroup(store, rank, size, device),
        devices=["cpu"],
    )
    _patch_reads(device)
    _patch_threads(device)
    return device


def _patch_reads(device: VirtualDevice) -> None:
    def wait_before(function: Any) -> Any:
        def read(*args: Any, **kwargs: Any) -> Any:
            if _uses_device(threading.current_thread()):
                device.current_stream().synchronize()
            return function(*args, **kwargs)

        return read

    for name in ("tolist", "numpy", "cpu"):
        setattr(torch.Tensor, name, wait_before(getattr(torch.Tensor, name)))
    torch.save = wait_before(torch.save)


def _patch_threads(device: VirtualDevice) -> None:
    run = threading.Thread.run

    def run_queued(self: threading.Thread) -> None:
        if not _uses_device(self):
            return run(self)
        with device.mode():
            return run(self)

    threading.Thread.run = run_queued  # type: ignore[method-assign]


def _uses_device(thread: threading.Thread) -> bool:
    owner, _, name = thread.name.partition("-")
    return owner == "rayzero" and name not in _HOST_THREADS
