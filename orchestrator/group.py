"""What the controller needs of the workers, without Ray: tests put a fake in its place."""

from __future__ import annotations

from typing import Protocol

from rayzero.orchestrator.policies.placement import Need
from rayzero.workers.messages import Assign, Message, WorkerInfo


class WorkerLostError(Exception):
    """A worker's process is gone. The text says what the cluster knows about the cause."""


class WorkerGroup(Protocol):
    """The workers of one job. All but `place` and `release` may raise WorkerLostError."""

    async def place(self, need: Need) -> tuple[WorkerInfo, ...]:
        """Reserves resources and starts the workers; returns when all of them answer.

        Raises:
            JobFailedError: the resources did not come in time, or a worker did not start.
        """

    async def open_store(self, worker: int) -> int:
        """The port of a new store in that worker's process."""

    async def assign(self, worker: int, assign: Assign) -> None:
        """Begins a generation on one worker."""

    async def poll(self, worker: int, timeout_s: float) -> list[Message]:
        """What happened on one worker; waits up to `timeout_s` for something to happen."""

    async def stop(self, worker: int) -> None:
        """Asks one worker to unwind the user's function."""

    async def release(self) -> None:
        """Ends every worker and gives the resources back. May be called at any time, and twice."""
