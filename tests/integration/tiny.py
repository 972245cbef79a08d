"""A minimal worker without torch or training, to test cluster management."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import ray

from rayzero.orchestrator.cluster.worker_group import WorkerGroup
from rayzero.workers.messages import (
    GenerationSpec,
    MirrorPolicy,
    RankAssignment,
    WorkerInfo,
    WorkerMessage,
    WorkerSpec,
)
from rayzero.workers.vault.client import VaultClient


class TinyWorker:
    """A worker that only describes itself.

    Args of the job:
        crash_file: the worker crashes at start while this file exists.
        gate: the worker waits at start until this file exists, after creating `{gate}-{index}`.
    """

    def __init__(self, spec: WorkerSpec, index: int) -> None:
        self._index = index
        self._crash_file = spec.args.get("crash_file", "")
        self._gate = spec.args.get("gate", "")
        self._vault: VaultClient | None = None

    def describe(self) -> WorkerInfo:
        if self._crash_file and Path(self._crash_file).exists():
            os._exit(3)
        if self._gate:
            Path(f"{self._gate}-{self._index}").touch()
            while not Path(self._gate).exists():
                time.sleep(0.05)
        context = ray.get_runtime_context()
        node_id = context.get_node_id()
        return WorkerInfo(self._index, node_id, socket.gethostname(), "127.0.0.1", os.getpid())

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self, method)(*args)

    def poll(self, timeout_s: float) -> list[WorkerMessage]:
        time.sleep(timeout_s)
        return []

    def open_store(self) -> int:
        """Stub for an arbitrary command. Returns the process id."""
        return os.getpid()

    def assign(self, generation: GenerationSpec, assignment: RankAssignment) -> None:
        """Connect to the vault, as a real worker does."""
        self._vault = VaultClient(assignment.vault, self._index)


def make_spec(folder: Path, **changes: Any) -> WorkerSpec:
    values: dict[str, Any] = {
        "name": "tiny",
        "entrypoint": "m:f",
        "args": {},
        "seed": 0,
        "steps": None,
        "output_dir": str(folder),
        "engine_config": None,
        "cpus": 1.0,
        "gpus": 0.0,
        "hang_timeout_s": 30.0,
        "working_dir": str(folder),
        "import_paths": (),
        "mirror": MirrorPolicy(),
    }
    return WorkerSpec(**(values | changes))


async def wait_until_lost(workers: WorkerGroup, *indices: int) -> dict[int, str]:
    """Wait until all of these workers are lost. Returns the reasons by worker index."""
    lost: dict[int, str] = {}
    workers.subscribe(indices)
    while not lost.keys() >= set(indices):
        lost |= (await workers.receive()).lost
    return lost
