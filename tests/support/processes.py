"""Processes that tests start: forked from one that has imported what they need, and has no threads.

To import torch, and what its first optimizer loads, costs a process three seconds of a core.
"""

from __future__ import annotations

from multiprocessing import get_context

PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "torch._dynamo",
        "rayzero.workers.worker",
        "tests.workers.recovery_jobs",
        "tests.support.ranks",
    ]
)
