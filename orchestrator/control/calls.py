"""Calls to workers and vaults, with a limit for each reply."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from rayzero.orchestrator.aio import PendingReplies
from rayzero.orchestrator.control.loop import JobLoop
from rayzero.orchestrator.errors import VaultLostError, WorkerLostError
from rayzero.workers.vault.vault import Vault

if TYPE_CHECKING:  # they import Ray, without which the controller is tested
    from rayzero.orchestrator.cluster.vault_group import VaultGroup
    from rayzero.orchestrator.cluster.worker_group import WorkerGroup

LEAST_REPLY_LIMIT_S = 10.0
"""Least time that a worker or a vault has to reply to a command; a quarter of `recovery.patience_s`
if that is more."""

EXIT_POLL_S = 0.1
"""How often a vault is asked whether a killed process has exited."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class WorkerUnavailableError(Exception):
    """A worker's process ended or does not respond; `cause` has the reason, or is empty."""

    def __init__(self, worker: int, cause: str) -> None:
        super().__init__(worker, cause)
        self.worker = worker
        self.cause = cause


def timeout_reason(limit_s: float) -> str:
    """Returns the cause to record for a worker or a vault that does not respond."""
    return f"its process did not respond for {limit_s:g} s"


def reply_limit_s(patience_s: float) -> float:
    """Returns how long a process may take to reply to a command before it counts as lost."""
    return max(LEAST_REPLY_LIMIT_S, patience_s / 4)


class Calls:
    """Calls methods of workers and vaults, and awaits their replies.

    Args:
        patience_s: `recovery.patience_s`.
    """

    def __init__(
        self, loop: JobLoop, workers: WorkerGroup, vaults: VaultGroup, patience_s: float
    ) -> None:
        self._loop = loop
        self._workers = workers
        self._vaults = vaults
        self._limit_s = reply_limit_s(patience_s)

    async def worker(
        self,
        worker: int,
        method: Callable[[Any, *Ts], T],
        *args: *Ts,
        limit_s: float | None = None,
    ) -> T:
        """Returns the reply of `method`, one of `WorkerCalls`, from a worker's process.

        Raises:
            WorkerUnavailableError: the process ended, or did not reply within the limit.
        """
        return await self.worker_reply(worker, self._workers.call(worker, method, *args), limit_s)

    async def vault(
        self,
        node: str,
        method: Callable[[Any, *Ts], T],
        *args: *Ts,
        limit_s: float | None = None,
    ) -> T:
        """Returns the reply of `method`, one of `Vault`, from a node's vault.

        Raises:
            VaultLostError: the vault's process or node is gone, or it did not reply within the
                limit.
        """
        return await self.vault_reply(self._vaults.call(node, method, *args), limit_s)

    async def worker_reply(
        self, worker: int, reply: Awaitable[T], limit_s: float | None = None
    ) -> T:
        """Awaits a worker's reply, as `worker`."""
        limit_s = self._limit_s if limit_s is None else limit_s
        try:
            return await self._loop.within(limit_s, reply)
        except TimeoutError:
            raise WorkerUnavailableError(worker, timeout_reason(limit_s)) from None
        except WorkerLostError as lost:
            raise WorkerUnavailableError(worker, str(lost)) from None

    async def vault_reply(self, reply: Awaitable[T], limit_s: float | None = None) -> T:
        """Awaits a vault's reply, as `vault`."""
        limit_s = self._limit_s if limit_s is None else limit_s
        try:
            return await self._loop.within(limit_s, reply)
        except TimeoutError:
            raise VaultLostError(timeout_reason(limit_s)) from None

    async def end_process(self, worker: int, end: Callable[[int], Awaitable[None]]) -> None:
        """Ends a worker's process, if it has not ended yet, with a method of the worker's group."""
        with suppress(WorkerUnavailableError):
            await self.worker_reply(worker, end(worker))

    async def wait_exited(self, node: str, pid: int, limit_s: float) -> bool:
        """Waits until a killed process has exited. Returns False if it still runs after the limit.
        A process with a GPU frees its device memory before it exits, which takes seconds for tens
        of GB; a replacement needs that memory."""
        until_s = self._loop.now_s() + limit_s
        with suppress(VaultLostError):  # its node is lost, or cannot be asked
            while await self.vault(node, Vault.runs, pid):
                if self._loop.now_s() > until_s:
                    return False
                await self._loop.sleep(EXIT_POLL_S)
        return True

    def broadcast(
        self, workers: Iterable[int], method: Callable[[Any, *Ts], None], *args: *Ts
    ) -> None:
        """Calls `method`, one of `WorkerCalls`, in several workers' processes."""
        self.expect(self._workers.broadcast(workers, method, *args))

    def expect(self, replies: PendingReplies) -> None:
        """Waits for replies in the background. A worker that does not reply in time counts as
        lost."""
        self._loop.spawn(self._await_replies(replies))

    async def _await_replies(self, replies: PendingReplies) -> None:
        try:
            await self._loop.within(self._limit_s, replies.wait_all())
        except TimeoutError:
            for worker in sorted(replies.pending):
                self._loop.on_error(WorkerUnavailableError(worker, timeout_reason(self._limit_s)))
