"""Functions of worker processes. Each prints a line when it has reached its point."""

from __future__ import annotations

import os
import time

from rayzero.workers.vault.client import VaultClient
from tests.workers.vault.support import table, write


def say_and_wait(text: str = "ready") -> None:
    print(text, flush=True)
    time.sleep(60)


def connect(address: str, worker: int) -> None:
    client = VaultClient(address, worker)
    say_and_wait()
    client.close()


def mirror(address: str, worker: int) -> None:
    """Mirrors two steps, and begins a third."""
    client = VaultClient(address, worker)
    first = client.reserve(1, worker, 1, table(worker))
    write(first, worker, 1)
    write(client.reserve(1, worker, 1, table(worker)), worker, 2)
    first.begin()
    first.data[:3] = b"new"
    say_and_wait()
    client.close()


def fork(address: str, worker: int) -> None:
    """Has a child that outlives it with all its descriptors, like a data loader's worker."""
    client = VaultClient(address, worker)
    if not os.fork():
        os.close(1)
        time.sleep(5)
        os._exit(0)
    say_and_wait()
    client.close()


def deregister(address: str, worker: int) -> None:
    VaultClient(address, worker).close()
    say_and_wait()
