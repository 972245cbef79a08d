"""Starts workers in the places of those that were lost or retired."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayzero.orchestrator.control.calls import Calls
from rayzero.orchestrator.control.failures import FailureHandler
from rayzero.orchestrator.control.loop import JobLoop, JobMachine
from rayzero.orchestrator.control.members import Members
from rayzero.orchestrator.control.node_health import NodeHealth
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.policies import placement
from rayzero.orchestrator.progress import JobProgress
from rayzero.workers.messages import WorkerInfo

if TYPE_CHECKING:  # it imports Ray, without which the controller is tested
    from rayzero.orchestrator.cluster.worker_group import WorkerGroup

REPLACE_DELAY_S = 10.0
"""Longest wait of a replacement for the first step after a recovery."""


@dataclass(eq=False)
class Replacements:
    """Reuses the reservations of lost workers, after a backoff and away from bad nodes."""

    _plan: JobPlan
    _loop: JobLoop
    _machine: JobMachine
    _members: Members
    _calls: Calls
    _workers: WorkerGroup
    _events: EventBus
    _progress: JobProgress
    _failures: FailureHandler
    _health: NodeHealth
    _quarantined: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Starts replacements, but not during a recovery that does not need them: their imports
        would compete with it for CPU time."""
        registry = self._members.registry
        while True:
            await self._loop.wait_until(
                lambda: bool(registry.awaiting_replacement) and self._may_replace
            )
            if self._machine.is_running:
                await self._loop.wait_for(
                    REPLACE_DELAY_S, lambda: self._has_progressed or not self._machine.is_running
                )
            if not self._may_replace:
                continue
            await self._failures.kills.wait()  # a reservation is reused only when it is empty
            lost = registry.awaiting_replacement
            registry.awaiting_replacement = ()
            for worker in lost:
                self._loop.spawn(self._replace_when_free(worker))

    async def _replace_when_free(self, worker: WorkerInfo) -> None:
        await self._wait_device_free(worker)
        began_s = self._loop.now_s()
        if self._failures.was_lost(worker.index) and self._is_suspect(worker):
            await self._health.check_again(worker)
        self._replace(worker, self._loop.now_s() - began_s)

    def _is_suspect(self, worker: WorkerInfo) -> bool:
        spec, history = self._plan.spec, self._failures.history
        window_s, now_s = spec.recovery.fault_window_s, self._loop.now_s()
        faults = placement.count_hardware_faults(history, worker.node_id, window_s, now_s)
        return faults >= spec.health.after_faults

    async def _wait_device_free(self, worker: WorkerInfo) -> None:
        """Waits until a killed process has freed its GPU, at most `workers.start_timeout_s`:
        nothing ends a process that hangs in the kernel."""
        spec = self._plan.spec.workers
        if not spec.gpus:
            return
        if not await self._calls.wait_exited(worker.node_id, worker.pid, spec.start_timeout_s):
            self._events.warn(
                f"the process {worker.pid} on node {worker.node} was killed, and still runs"
            )

    @property
    def _may_replace(self) -> bool:
        if self._machine.is_running:
            return True
        forming = (State.STARTING, State.RECOVERING, State.RESIZING)
        registry = self._members.registry
        too_few = bool(registry.awaited) or registry.select_members() is None
        return self._machine.state in forming and too_few

    @property
    def _has_progressed(self) -> bool:
        """Whether the newest generation has finished a step."""
        restore = self._members.generation.restore
        return self._progress.steps > (restore.step if restore is not None else 0)

    def _replace(self, worker: WorkerInfo, waited_s: float = 0.0) -> None:
        """Starts a worker in the place of one that was lost or retired, unless there are enough.
        `waited_s` is the part of the delay after a fault that has passed."""
        registry = self._members.registry
        limits = registry.limits
        if len(registry.ready) >= limits.max + limits.spares:
            self._loop.spawn(self.release(worker))
            return
        window_s = self._plan.spec.recovery.fault_window_s
        history, now_s = self._failures.history, self._loop.now_s()
        nodes = {*registry.nodes, worker.node_id}
        unhealthy = registry.unhealthy_nodes
        bad = placement.quarantined_nodes(history, nodes, window_s, now_s, unhealthy)
        for node in sorted(bad - self._quarantined - unhealthy):
            self._events.warn(self._quarantine_text(node))
        self._quarantined = bad
        delay_s = 0.0
        if self._failures.was_lost(worker.index):
            delay_s = placement.restart_backoff_s(history, worker.node_id, window_s, now_s)
            delay_s = max(0.0, delay_s - waited_s)
        avoid = sorted(bad | registry.draining_nodes)
        self._workers.replace(worker.index, delay_s, avoid)

    def _quarantine_text(self, node: str) -> str:
        workers = [fault.worker for fault in self._failures.history]
        name = next(worker.node for worker in workers if worker.node_id == node)
        return (
            f"node {name} had {placement.QUARANTINE_FAULTS} hardware faults or more within "
            f"recovery.fault_window_s: no replacement is started there"
        )

    async def relocate(self, worker: WorkerInfo) -> None:
        """Ends a worker's process, and starts one in its place on another node."""
        await self._calls.end_process(worker.index, self._workers.kill)
        self._replace(worker)

    async def release(self, worker: WorkerInfo) -> None:
        """Ends a worker that is not needed, and gives up its reservation."""
        await self._calls.end_process(worker.index, self._workers.release_worker)
