"""Injects the faults that workers cannot inject: of vaults and nodes, and damage to stored
checkpoints.

Workers inject their own faults, and vaults those of their writes; faults requested while the job
runs are forwarded to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rayzero.engine.checkpoint.manifest import RankFile
from rayzero.engine.checkpoint.store import is_remote
from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.control.calls import Calls
from rayzero.orchestrator.control.loop import JobLoop
from rayzero.orchestrator.control.members import Members
from rayzero.orchestrator.control.roles import RolePools
from rayzero.orchestrator.errors import VaultLostError
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.progress import JobProgress
from rayzero.orchestrator.top.format import count_of
from rayzero.workers.calls import WorkerCalls
from rayzero.workers.chaos.inject import FaultRecord, FaultSchedule, damage_file
from rayzero.workers.chaos.spec import FaultSpec, parse_fault, why_no_such_worker

if TYPE_CHECKING:  # it imports Ray, without which the controller is tested
    from rayzero.orchestrator.cluster.vault_group import VaultGroup

VAULT_REPLY_TIMEOUT_S = 5.0
"""How long a vault may take to reply: a user waits for the result."""


@dataclass(eq=False)
class ClusterFaultInjector:
    """Owns the record of fired faults, from `start` on. Does nothing without faults."""

    _plan: JobPlan
    _loop: JobLoop
    _members: Members
    _calls: Calls
    _vaults: VaultGroup
    _events: EventBus
    _progress: JobProgress
    _roles: RolePools
    injected: tuple[FaultSpec, ...] = ()
    """All faults requested while the job runs."""
    _in_progress: set[FaultSpec] = field(default_factory=set)
    _skipped: set[FaultSpec] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._faults = self._plan.worker_spec.faults
        self._record = FaultRecord(self._plan.output_dir)
        self._schedule = FaultSchedule(self._record, self._events.emit)

    def start(self, *, resumed: bool) -> None:
        """Starts with a run. Faults that fired in an earlier run count only if this run resumes
        from it.

        Raises:
            ConfigError: the record cannot be written.
        """
        self._record.retain_only({str(fault) for fault in self._faults} if resumed else ())
        self._schedule.set_faults(self._faults)

    async def inject(self, texts: Sequence[str]) -> str:
        """Schedules further faults: at once if they name no step. Returns a message for the user.

        Raises:
            ConfigError: a fault is not valid, or impossible in this job. Then none is scheduled.
        """
        current = self._progress.steps + 1
        faults = tuple(parse_fault(text, current) for text in texts)
        for fault in faults:
            if why := await self._why_impossible(fault):
                raise ConfigError(f"fault {str(fault)!r} cannot happen: {why}")
        self.injected += faults
        self._schedule.set_faults(self._faults + self.injected)
        with suppress(VaultLostError):  # VaultManager handles a vault that does not respond
            injecting = self._vaults.inject_faults(self.injected)
            await self._calls.vault_reply(injecting, VAULT_REPLY_TIMEOUT_S)
        # The next generation gets them with its spec.
        self._calls.broadcast(self._members.generation.active, WorkerCalls.inject, self.injected)
        self._inject_into_roles(current)  # at once: ranks may wait for the role, and end no step
        when = {fault: "" if fault.step <= current else " from that step on" for fault in faults}
        name = self._plan.spec.name
        return "\n".join(
            f"{name}: {fault} at the next opportunity{when[fault]}" for fault in faults
        )

    def on_step_finished(self, step: int) -> None:
        """Injects the faults that are due in the next step. Called when a step was finished."""
        self._inject_into_roles(step + 1)
        for fault in self._schedule.due(step + 1):
            if (
                fault.target in ("vault", "cluster")
                and fault not in self._in_progress | self._skipped
            ):
                self._in_progress.add(fault)
                self._loop.spawn(self._inject_node_fault(fault, step + 1))

    def _inject_into_roles(self, step: int) -> None:
        for fault in self._schedule.due(step):
            if fault.role and (signal := self._roles.fault_call(fault)) is not None:
                self._schedule.record_fired(fault, fault.worker, step)
                self._loop.spawn(signal)

    def on_checkpoint_committed(self, step: int, folder: str, files: Sequence[RankFile]) -> None:
        """Injects the faults that damage this checkpoint. Each file is damaged once: a removed file
        is gone, and a second bit flip would undo the first."""
        names = {file.rank: file.name for file in files}
        for fault in self._schedule.due(step):
            if fault.kind == "tear_file" and is_remote(folder):
                self._skip(fault, f"{folder} is not on a local or mounted disk")
            elif fault.kind == "tear_file" and fault.rank in names:
                self._schedule.record_fired(fault, fault.rank, step)
                path = Path(folder.removeprefix("file://"), names.pop(fault.rank))
                damage_file(path, fault.how)

    async def _inject_node_fault(self, fault: FaultSpec, step: int) -> None:
        try:
            nodes = self._nodes_by_rank()
            if fault.node >= len(nodes):
                return  # that node may join later
            if why := await self._why_not_injectable(fault):
                self._skip(fault, why)
                return
            node = nodes[fault.node]
            members = self._members.generation.workers
            rank = next(rank for rank, w in enumerate(members) if w.node_id == node)
            self._schedule.record_fired(fault, rank, step)
            await self._calls.vault_reply(self._vaults.inject_node_fault(node, fault))
        except VaultLostError:
            pass  # the vault is lost, perhaps before it could act: retried after the next step
        finally:
            self._in_progress.discard(fault)

    def _skip(self, fault: FaultSpec, why: str) -> None:
        if fault not in self._skipped:
            self._skipped.add(fault)
            self._events.warn(f"fault {fault} was not injected: {why}")

    async def _why_impossible(self, fault: FaultSpec) -> str:
        """Returns why a fault is impossible in this job now; empty if it is possible."""
        max_workers, nodes = self._members.registry.limits.max, len(self._nodes_by_rank())
        if fault.target == "role":
            return why_no_such_worker(fault, self._roles.most)
        if fault.target == "worker":
            return f"the job has at most {max_workers} workers" if fault.rank >= max_workers else ""
        if fault.target in ("vault", "cluster"):
            if fault.node >= nodes:
                return f"the job is on {count_of(nodes, 'node')} now, counted from 0"
            try:
                return await self._why_not_injectable(fault)
            except VaultLostError:
                return "that node's vault does not respond"
        if not self._plan.writes_checkpoints:
            return "the job writes no checkpoints (checkpoint.every_steps)"
        if fault.kind == "tear_file" and is_remote(self._plan.job_folder):
            return f"{self._plan.job_folder} is not on a local or mounted disk"
        return ""

    async def _why_not_injectable(self, fault: FaultSpec) -> str:
        node = self._nodes_by_rank()[fault.node]
        reply = self._vaults.why_not_injectable(node, fault)
        return await self._calls.vault_reply(reply, VAULT_REPLY_TIMEOUT_S)

    def _nodes_by_rank(self) -> list[str]:
        """Returns the nodes in the order of their first ranks."""
        return list(dict.fromkeys(worker.node_id for worker in self._members.generation.workers))
