"""Multiprocessing context for tests: a fork server with the heavy imports preloaded.

Importing torch and what its first optimizer loads costs three CPU seconds per process. The fork
server has no threads, so forking from it is safe.
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
