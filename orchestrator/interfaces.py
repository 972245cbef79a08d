"""What the controller and its groups of workers and vaults share, without Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayzero.workers.messages import WorkerMessage

WORKER_POLL_S = 2.0
"""Longest time between two messages of a subscribed worker; an empty one says that it lives."""


class WorkerLostError(Exception):
    """A worker's process is gone. The text says what the cluster knows about the cause."""


class VaultLostError(Exception):
    """A vault's process is gone, or its node."""


@dataclass(frozen=True)
class WorkerReports:
    """Messages and losses of several workers.

    Args:
        messages: (worker, its messages in order); an empty list says that the worker is alive. The
            receiver owns the lists.
        lost: (worker, the cause as far as it is known); its last messages come before this.
    """

    messages: Sequence[tuple[int, list[WorkerMessage]]] = ()
    lost: Sequence[tuple[int, str]] = ()
