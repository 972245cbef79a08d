"""A minimal worker without torch or training, to test cluster management."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ray

from rayzero.orchestrator.aio import Clock
from rayzero.orchestrator.cluster.vault_group import VaultGroup
from rayzero.orchestrator.cluster.worker_group import WorkerGroup
from rayzero.orchestrator.policies.placement import ResourceRequest
from rayzero.workers.agent.link import worker_socket
from rayzero.workers.agent.message_sender import MessageSender
from rayzero.workers.messages import (
    GenerationSpec,
    LogLine,
    MirrorPolicy,
    RankAssignment,
    WorkerInfo,
    WorkerMessage,
    WorkerSpec,
)
from rayzero.workers.vault.client import VaultClient
from rayzero.workers.vault.records import VaultEvent

LIMIT_S = 150.0


class TinyWorker:
    """A worker that only describes itself.

    Args of the job:
        crash_file: the worker crashes at start while this file exists.
        gate: the worker waits at start until this file exists, after creating `{gate}-{index}`.
    """

    def __init__(self, spec: WorkerSpec, index: int, orphan_s: float) -> None:
        self._spec = spec
        self._index = index
        self._polls = 0
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
        node_id = ray.get_runtime_context().get_node_id()
        MessageSender(
            worker_socket(self._spec.name, self._spec.run, node_id),
            self._index,
            lambda _: self.poll(0.1),
            self,
        )
        return WorkerInfo(self._index, node_id, socket.gethostname(), "127.0.0.1", os.getpid())

    def ping(self) -> None: ...

    def poll(self, timeout_s: float) -> list[WorkerMessage]:
        time.sleep(timeout_s)
        self._polls += 1
        return [LogLine(self._index, "stdout", f"{self._polls}")]

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
        "patience_s": 30.0,
        "working_dir": str(folder),
        "import_paths": (),
        "mirror": MirrorPolicy(),
    }
    return WorkerSpec(**(values | changes))


async def wait_until_lost(workers: WorkerGroup, *indices: int) -> dict[int, str]:
    """Wait until all of these workers are lost. Returns the reasons by worker index."""
    lost: dict[int, str] = {}
    workers.subscribe(indices)
    async with asyncio.timeout(LIMIT_S):
        while not lost.keys() >= set(indices):
            lost |= dict((await workers.receive()).lost)
    return lost


@asynccontextmanager
async def groups(
    folder: Path, can_grow: bool = True, **args: str
) -> AsyncIterator[tuple[WorkerGroup, VaultGroup]]:
    """Tiny workers and their vaults."""
    spec = make_spec(folder, args=args)
    vaults = VaultGroup(spec)
    workers = WorkerGroup(spec, Clock(), can_grow, vaults, TinyWorker)
    try:
        yield workers, vaults
    finally:
        await workers.release()
        await vaults.release()
    await workers.release()  # idempotent


def request(min_workers: int, max_workers: int, cpus: float = 1.0) -> ResourceRequest:
    return ResourceRequest(min_workers, max_workers, cpus, 0.0, LIMIT_S)


async def next_worker(workers: WorkerGroup) -> WorkerInfo:
    return await asyncio.wait_for(workers.next_worker(), LIMIT_S)


async def next_events(vaults: VaultGroup, node: str) -> list[VaultEvent]:
    """Wait for what happens on a node."""
    return await vaults.events(node, LIMIT_S)


async def next_lines(workers: WorkerGroup, worker: int, number: int) -> list[int]:
    """The numbers of a worker's next lines."""
    found: list[int] = []
    async with asyncio.timeout(LIMIT_S):
        while len(found) < number:
            for index, messages in (await workers.receive()).messages:
                if index == worker:
                    found += [int(it.text) for it in messages if isinstance(it, LogLine)]
    return found
