"""A worker's process without torch and training: what the Ray side of a job is tested with."""

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
    """Knows where it is. `args["trouble"]`: a file that, while it is there, keeps it from
    starting. `args["gate"]`: one that it waits for; it leaves another beside it to say so."""

    def __init__(self, setup: WorkerSpec, index: int) -> None:
        self._index = index
        self._trouble = setup.args.get("trouble", "")
        self._gate = setup.args.get("gate", "")
        self._vault: VaultClient | None = None

    def describe(self) -> WorkerInfo:
        if self._trouble and Path(self._trouble).exists():
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
        """Stands for any command: the process's id comes back."""
        return os.getpid()

    def assign(self, formation: GenerationSpec, own: RankAssignment) -> None:
        """Connects to a vault, as a generation does."""
        self._vault = VaultClient(own.vault, self._index)


def setup(folder: Path, **changes: Any) -> WorkerSpec:
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


async def lost(workers: WorkerGroup, *indices: int) -> dict[int, str]:
    """Listens to these until all of them are gone; why, by worker."""
    found: dict[int, str] = {}
    workers.subscribe(indices)
    while not found.keys() >= set(indices):
        found |= (await workers.receive()).lost
    return found
