"""Small states, connected vaults, and worker processes to kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from xxhash import xxh3_64_intdigest

from rayzero.engine.layout.state_index import BlockIndex, LogicalTensor, TensorRange
from rayzero.workers.vault import images
from rayzero.workers.vault.client import VaultClient
from rayzero.workers.vault.records import SlotRef, VaultGoneError
from rayzero.workers.vault.registry import SlotRegistry
from rayzero.workers.vault.slots import SlotChecksums, SlotWriter
from rayzero.workers.vault.vault import Vault

ROOT = Path(__file__).resolve().parents[3]
UNLIMITED_BYTES = 2**40


def table(rank: int = 0, nbytes: int = 64) -> BlockIndex:
    """A rank's bytes of one tensor."""
    tensor_range = TensorRange("weights/w", rank * nbytes, (rank + 1) * nbytes, 0)
    return BlockIndex({"weights/w": LogicalTensor("U8", (nbytes * 8,))}, (tensor_range,), nbytes)


def content(rank: int, step: int, nbytes: int = 64) -> bytes:
    return bytes((rank * 31 + step * 7 + i) % 251 for i in range(nbytes))


def write(
    buffer: SlotWriter,
    rank: int,
    step: int,
    pin: bool = False,
    check: bool = True,
    keep: bool = False,
) -> None:
    """Write a mirror of a step as a worker does."""
    buffer.begin()
    data = content(rank, step, len(buffer.data))
    buffer.data[:] = data
    size = buffer.weight_bytes
    parts = SlotChecksums(xxh3_64_intdigest(data[:size]), xxh3_64_intdigest(data[size:]))
    buffer.commit(
        step, json.dumps({"step": step, "rank": rank}).encode(), pin, parts if check else None, keep
    )


def keep_only(registry: SlotRegistry, *keys: tuple[int, int, int]) -> None:
    """Drop all complete versions but those with these keys: (generation, rank, step)."""
    with registry._lock:
        registry._drop_entries(
            entry
            for entry, version in registry._complete_versions()
            if (version.generation, version.rank, version.step) not in keys
        )


def no_other_nodes(ref: SlotRef, offset: int, length: int) -> memoryview:
    raise VaultGoneError(f"no vault is known on node {ref.node_id}")


@dataclass
class VaultCluster:
    """Vaults of several nodes in this process, each reading from the others."""

    vaults: dict[str, Vault] = field(default_factory=dict)
    fetched: list[tuple[SlotRef, int, int]] = field(default_factory=list)
    on_fetch: Callable[[SlotRef, int], None] = lambda ref, offset: None
    on_copy: Callable[[str, SlotRef], None] = lambda node, ref: None
    clients: list[VaultClient] = field(default_factory=list)

    def vault(self, node: str = "a", **options: Any) -> Vault:
        if node not in self.vaults:
            self.vaults[node] = Vault("job", node, self._fetch, self._copy_to, **options)
        return self.vaults[node]

    def client(self, node: str = "a", worker: int = 0) -> VaultClient:
        client = VaultClient(self.vault(node).address(), worker)
        self.clients.append(client)
        return client

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for vault in self.vaults.values():
            vault.close()

    def _copy_to(self, node: str, ref: SlotRef, limit_s: float) -> int:
        self.on_copy(node, ref)
        if node not in self.vaults:
            raise VaultGoneError(f"no vault is known on node {node}")
        return self.vaults[node].replicate([ref])

    def _fetch(self, ref: SlotRef, offset: int, length: int) -> memoryview:
        self.fetched.append((ref, offset, length))
        self.on_fetch(ref, offset)
        data = self.vaults[ref.node_id].read(ref.generation, ref.rank, ref.step, offset, length)
        return data.data


@contextmanager
def worker_process(function: str, address: str, worker: int = 0) -> Iterator[subprocess.Popen[str]]:
    """A process that runs a function of `tests.workers.vault.functions` on the vault. It has
    printed its first line, and is killed afterwards."""
    script = f"from tests.workers.vault.functions import {function} as f; f({address!r}, {worker})"
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()


def steps_of(vault: Vault, generation: int | None = None) -> list[tuple[int, int]]:
    """(rank, step) of every complete version."""
    return sorted(
        (slot.rank, slot.step)
        for slot in vault.inventory()
        if generation in (None, slot.generation)
    )


def open_fds(name: str = "") -> int:
    """This process's descriptors; of files with that in their names."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder's own
            count += name in os.readlink(f"/proc/self/fd/{fd}")
    return count


def wait_for_fds(max_fds: int, name: str = "") -> None:
    """Wait until at most `max_fds` are open: the server closes descriptors after its reply."""
    deadline_s = monotonic() + 5.0
    while (count := open_fds(name)) > max_fds:
        assert monotonic() < deadline_s, f"{count - max_fds} descriptors are still open"
        sleep(0.01)


def refs(*keys: tuple[int, int, int], node: str = "a") -> list[SlotRef]:
    """References to the versions (generation, rank, step)."""
    return [SlotRef(*key, node) for key in keys]


def damage(vault: Vault, ref: SlotRef, where: Callable[[images.SlotReader], int]) -> None:
    """Flips a byte of a version."""
    fd = vault._registry.open_version(ref)
    image = images.MappedSlotReader(ref, fd)
    position = where(image)
    image.close()
    old = os.pread(fd, 1, position)
    os.pwrite(fd, bytes([old[0] ^ 1]), position)
    os.close(fd)
