"""Multiprocessing context for tests: a fork server with the heavy imports preloaded.

Importing torch and what its first optimizer loads costs three CPU seconds per process. The fork
server has no threads, so forking from it is safe.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing import forkserver, get_context
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

PROCESSES = get_context("forkserver")
_PRELOADED = [
    "tests.support.uncollected",
    "pytest",
    "torch._dynamo",
    "rayzero.workers.worker",
    "tests.support.nccl_like.install",
    "tests.workers.recovery_jobs",
    "tests.support.ranks",
]
_LIBRARIES = ["scipy.optimize", "datasets", "PIL.Image", "boto3"]
"""What transformers, accelerate and peft import. Not sklearn, whose forks leave semaphores, and not
these themselves, which look for deepspeed when they are imported."""
_LAST = "tests.support.collected"
PROCESSES.set_forkserver_preload([*_PRELOADED, _LAST])
_LAUNCHED = forkserver.ForkServer()
_LAUNCHED.set_forkserver_preload([*_PRELOADED, "tests.support.launched", _LAST])


def preload_libraries() -> None:
    """For the slow tests, many of whose processes import transformers. Before the first process."""
    installed = [name for name in _LIBRARIES if find_spec(name.partition(".")[0])]
    PROCESSES.set_forkserver_preload([*_PRELOADED, *installed, _LAST])


def start_forked(function: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
    """`torch.multiprocessing.spawn`, but from the fork server."""
    from torch.multiprocessing import start_processes  # not imported by the fork server's parent

    start_processes(function, args, nprocs, start_method="forkserver")


def start_launched(function: Callable[..., None], args: tuple[Any, ...]) -> BaseProcess:
    """A daemon from a fork server that has imported the libraries of launched scripts, too."""
    process = PROCESSES.Process(target=function, args=args, daemon=True)
    with mock.patch.object(forkserver, "connect_to_new_process", _LAUNCHED.connect_to_new_process):
        process.start()
    return process
