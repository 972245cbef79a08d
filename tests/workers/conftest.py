"""Workers in the process of a test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rayzero.engine.comm.elastic_group import CallHost, make_elastic_group
from rayzero.workers import process_group
from rayzero.workers.group_sockets import SocketTracker
from rayzero.workers.worker import WorkerProcess
from tests.workers.support import MakeWorker, setup


@pytest.fixture
def make_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeWorker]:
    """Create workers, and restore the state of the process afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.chdir(os.getcwd())
    environment, threads = dict(os.environ), torch.get_num_threads()
    workers: list[WorkerProcess] = []

    def make(entrypoint: str, **changes: Any) -> WorkerProcess:
        changes = {"working_dir": os.getcwd()} | changes
        worker = WorkerProcess(
            setup(entrypoint=f"tests.workers.functions:{entrypoint}", **changes), 0
        )
        workers.append(worker)
        return worker

    yield make
    for worker in workers:
        for generation in (1, 2):
            worker.fence(generation)
    process_group.abort_default_group(torch.device("cpu"), SocketTracker())
    make_elastic_group().host = CallHost()  # of functions that were given up
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
