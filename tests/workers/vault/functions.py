"""Functions of worker processes. Each prints a line when it is ready."""

from __future__ import annotations

import ctypes
import os
import time

from rayzero.workers.vault.client import VaultClient
from rayzero.workers.vault.process_end import enable_crash_report
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


def end_on_request(address: str, worker: int) -> None:
    """Ends in the way that the next line of stdin names."""
    enable_crash_report()
    client = VaultClient(address, worker)
    print("ready", flush=True)
    how = input()
    if how == "segfault":
        read_address_zero()
    os._exit(int(how) if client else 1)  # it lives until then


def read_address_zero() -> None:
    ctypes.string_at(0)


def fork(address: str, worker: int) -> None:
    """Fork a child that outlives it with all its descriptors, like a data loader's worker."""
    client = VaultClient(address, worker)
    if not os.fork():
        os.close(1)
        time.sleep(5)
        os._exit(0)
    print_and_wait()
    client.close()
