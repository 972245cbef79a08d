"""What worker processes of the tests do. Each says a line when it is where it should be."""

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
    """Two whole steps, and is in the middle of a third."""
    client = VaultClient(address, worker)
    first = client.reserve(1, worker, 1, table(worker))
    write(first, worker, 1)
    write(client.reserve(1, worker, 1, table(worker)), worker, 2)
    first.begin()
    first.data[:3] = b"new"
    say_and_wait()
    client.close()


def fork(address: str, worker: int) -> None:
    """Has a child that outlives it, with all its descriptors, as a data loader's worker does."""
    client = VaultClient(address, worker)
    if not os.fork():
        os.close(1)
        time.sleep(5)
        os._exit(0)
    say_and_wait()
    client.close()


def part(address: str, worker: int) -> None:
    VaultClient(address, worker).close()
    say_and_wait()
