"""Functions of worker processes. Each prints a line when it is ready."""

from __future__ import annotations

import os
import time

from rayzero.workers.vault.client import VaultClient
from tests.workers.vault.support import table, write


def print_and_wait(text: str = "ready") -> None:
    print(text, flush=True)
    time.sleep(60)


def connect(address: str, worker: int) -> None:
    client = VaultClient(address, worker)
    print_and_wait()
    client.close()


def mirror(address: str, worker: int) -> None:
    """Mirror two steps, and start a third."""
    client = VaultClient(address, worker)
    first = client.reserve(1, worker, 1, table(worker))
    write(first, worker, 1)
    write(client.reserve(1, worker, 1, table(worker)), worker, 2)
    first.begin()
    first.data[:3] = b"new"
    print_and_wait()
    client.close()


def fork(address: str, worker: int) -> None:
    """Fork a child that outlives it with all its descriptors, like a data loader's worker."""
    client = VaultClient(address, worker)
    if not os.fork():
        os.close(1)
        time.sleep(5)
        os._exit(0)
    print_and_wait()
    client.close()


def deregister(address: str, worker: int) -> None:
    VaultClient(address, worker).close()
    print_and_wait()
