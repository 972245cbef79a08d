"""A role's worker, and its view of the job while its function runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from rayzero.orchestrator.control.calls import Calls, WorkerUnavailableError
from rayzero.orchestrator.control.loop import JobLoop
from rayzero.orchestrator.control.members import Members
from rayzero.orchestrator.control.rollouts import RolloutBuffer
from rayzero.orchestrator.control.weight_versions import WeightVersions
from rayzero.workers.messages import WorkerInfo
from rayzero.workers.roles.role_calls import RoleCalls
from rayzero.workers.roles.view import RoleView


@dataclass(eq=False)
class RoleWorker:
    """A worker whose function was called, until it returns or its process is lost."""

    info: WorkerInfo
    number: int
    view: RoleView | None = None
    """The newest view that the worker has, or is being sent; None if it is unknown."""
    has_begun: bool = False
    hangs: bool = False
    step: int = 0


@dataclass(eq=False)
class RoleViews:
    """Makes the views of all roles' workers: vault, buffer of rollouts, weights."""

    _loop: JobLoop
    _members: Members
    rollouts: RolloutBuffer
    _versions: WeightVersions

    def of(self, worker: RoleWorker) -> RoleView:
        vault = self._members.vault_addresses.get(worker.info.node_id, "")
        return RoleView(vault, self.rollouts.address, self._versions.newest)

    async def keep(self, worker: RoleWorker, calls: Calls, has: Callable[[], bool]) -> None:
        """Sends a worker its view whenever it changes, as long as `has` holds. Makes one call at a
        time, so that a slow worker gets only the newest view."""
        while True:
            await self._loop.wait_until(lambda: not has() or self.of(worker) != worker.view)
            if not has():
                return
            worker.view = self.of(worker)
            with suppress(WorkerUnavailableError):  # its poll or its vault reports the loss
                await calls.worker(worker.info.index, RoleCalls.update, worker.view)
