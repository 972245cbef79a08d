"""Workers in the process of a test, and in processes of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch

from rayzero.engine.comm.elastic_group import CallHost, make_elastic_group
from rayzero.workers import process_group
from rayzero.workers.group_sockets import SocketTracker
from rayzero.workers.worker import WorkerProcess
from tests.support.nccl_like.settings import NcclLike
from tests.workers.local_workers import STEPS, LocalWorkers
from tests.workers.recovery_jobs import engine_config
from tests.workers.support import MakeWorker, StartWorkers, mirrored_setup, setup
from tests.workers.vault.support import VaultCluster


@pytest.fixture
def cluster() -> Iterator[VaultCluster]:
    with closing(VaultCluster()) as cluster:
        yield cluster


@pytest.fixture
def start_workers(tmp_path: Path) -> Iterator[StartWorkers]:
    """Start workers for a function of `tests.workers`; they are killed at the test's end."""
    with ExitStack() as groups:

        def start(
            count: int,
            stage: int = 2,
            function: str = "recovery_jobs:train",
            nccl_like: NcclLike | None = None,
            **changes: Any,
        ) -> LocalWorkers:
            defaults = {"steps": STEPS, "engine_config": engine_config(stage)}
            spec = mirrored_setup(tmp_path, f"tests.workers.{function}", **(defaults | changes))
            return groups.enter_context(closing(LocalWorkers(spec, count, nccl_like)))

        yield start


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
