"""Polls a process group's asynchronous error, which NCCL finds in the background.

The training thread waits for the device, not for the group: without this, a broken network would
look like a rank that hangs in its own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import torch

from rayzero.engine.comm.elastic_group import elastic_group
from rayzero.engine.device import get_device
from rayzero.engine.torch_private import error_reader

POLL_INTERVAL_S = 1.0
"""How often the error is read: a lock and a copy."""


@contextmanager
def polled_group_errors(device: torch.device, on_error: Callable[[str], None]) -> Iterator[None]:
    """While it is entered, a thread polls the generation's group, if its backend reports errors;
    builds of torch without NCCL do not.

    The thread ends with its first error, without a group, or within `POLL_INTERVAL_S` of the exit.

    Args:
        on_error: called on that thread, at most once.
    """
    if not get_device(device).asynchronous:
        yield
        return
    left = Event()

    def poll() -> None:
        read = None
        while not left.wait(POLL_INTERVAL_S):
            try:
                read = read or _error_reader(device)
                name = read().name if read is not None else "SUCCESS"
            except RuntimeError:  # the group was not made, or was aborted meanwhile
                return
            if name != "SUCCESS" and not left.is_set():
                on_error(f"the process group reports {name}: a peer, or the network, failed")
                return

    thread = Thread(target=poll, name="rayzero-group-errors", daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()


def _error_reader(device: torch.device) -> Callable[[], Any] | None:
    """The backend's method. Looked up: torch's base class does not have it in all builds."""
    group = elastic_group()
    return None if group is None else error_reader(group.get_group(), device)
