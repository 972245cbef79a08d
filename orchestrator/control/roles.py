"""The roles of a job, by name: their pools begin and end with it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from rayzero.engine.errors import ConfigError, did_you_mean
from rayzero.orchestrator.control.calls import Calls
from rayzero.orchestrator.control.loop import JobLoop, JobMachine
from rayzero.orchestrator.control.members import Members
from rayzero.orchestrator.control.role_budget import RoleBudget
from rayzero.orchestrator.control.role_pool import RolePool
from rayzero.orchestrator.control.role_worker import RoleViews
from rayzero.orchestrator.control.vaults import VaultManager
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.plan import RolePlan
from rayzero.orchestrator.results import RoleStatus
from rayzero.workers.chaos.spec import FaultSpec
from rayzero.workers.vault.process_end import ProcessEnd
from rayzero.workers.worker_status import WorkerStatus

if TYPE_CHECKING:  # they import Ray, without which the controller is tested
    from rayzero.orchestrator.cluster.vault_group import VaultGroup
    from rayzero.orchestrator.cluster.worker_group import WorkerGroup

END_LIMIT_S = 5.0
"""How long the end of a job waits for functions to return; others end with their process."""


class RolePools:
    """The pools of all roles of a job, by name."""

    def __init__(
        self,
        roles: Sequence[tuple[RolePlan, WorkerGroup]],
        vault_group: VaultGroup,
        events: EventBus,
        loop: JobLoop,
        machine: JobMachine,
        members: Members,
        vaults: VaultManager,
        views: RoleViews,
    ) -> None:
        self.by_name: dict[str, RolePool] = {}
        self._loop = loop
        self._members = members
        self.rollouts = views.rollouts
        self._groups = [group for _, group in roles]
        self._vault_group = vault_group
        vaults.on_other_process_ended = self._on_process_ended
        for plan, group in roles:
            calls = Calls(loop, group, vault_group, plan.worker_spec.patience_s)
            self.by_name[plan.name] = RolePool(
                plan,
                loop,
                RoleBudget(plan, loop, machine, events),
                members,
                calls,
                group,
                events,
                vaults,
                views,
                self._note_nodes,
            )

    def find(self, role: str) -> RolePool:
        """Returns the pool of a role. Raises ConfigError if there is no such role."""
        if role not in self.by_name:
            names = list(self.by_name)
            raise ConfigError(
                f"the job has no role {role!r}{did_you_mean(role, names)}",
                allowed=", ".join(names) or "none: the job file has no `roles:`",
            )
        return self.by_name[role]

    @property
    def most(self) -> dict[str, int]:
        """The maximum number of workers of each role."""
        return {name: pool.most for name, pool in self.by_name.items()}

    def fault_call(self, fault: FaultSpec) -> Coroutine[Any, Any, None] | None:
        """Returns the result of `RolePool.fault_call`. The role is one of the job's."""
        return self.by_name[fault.role].fault_call(fault)

    def start(self) -> None:
        self._loop.spawn(self.rollouts.run())
        for pool in self.by_name.values():
            self._loop.spawn(pool.run())

    def resume(self, found: Sequence[WorkerStatus]) -> None:
        """Continues with the workers that have outlived a lost controller."""
        living = {status.info.index for status in found}
        heard_of = range(1 + max(self._vault_group.last_worker, *living, -1))
        self.rollouts.resume(index for index in heard_of if index not in living)
        self._loop.spawn(self.rollouts.run())
        for pool in self.by_name.values():
            own = [status for status in found if status.role == pool.name]
            self._loop.spawn(pool.resume(own))

    async def grow(self) -> None:
        """Requests more than the least numbers of workers, once each role has its own least number.
        Otherwise a role, or the ranks, would take resources that another role needs to begin."""
        pools = self.by_name.values()
        await self._loop.wait_until(lambda: all(pool.has_least for pool in pools))
        for pool in pools:
            pool.grow()

    def status(self) -> dict[str, RoleStatus]:
        return {name: pool.status() for name, pool in self.by_name.items()}

    async def end(self) -> None:
        """Ends the functions of all roles with the job: see `RolePool.end`."""
        await asyncio.gather(*(pool.end(END_LIMIT_S) for pool in self.by_name.values()))

    async def release(self) -> None:
        """Ends all processes, and removes their reservations."""
        await asyncio.gather(*(group.release() for group in self._groups))

    def _note_nodes(self) -> None:
        nodes = (pool.nodes for pool in self.by_name.values())
        self._members.role_nodes = frozenset().union(*nodes)

    def _on_process_ended(self, index: int, pid: int, end: ProcessEnd) -> None:
        for pool in self.by_name.values():
            pool.on_process_ended(index, pid, end)
