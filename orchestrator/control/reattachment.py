"""Continues with the workers of a lost controller, and restores its knowledge from their
reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rayzero.orchestrator.control.checkpoint_pins import CheckpointPins
from rayzero.orchestrator.control.checkpoints import CheckpointWriter
from rayzero.orchestrator.control.dispatcher import MessageDispatcher
from rayzero.orchestrator.control.failures import FailureHandler
from rayzero.orchestrator.control.generation import GenerationState
from rayzero.orchestrator.control.inbox import WorkerInbox
from rayzero.orchestrator.control.loop import JobLoop
from rayzero.orchestrator.control.members import Members
from rayzero.orchestrator.control.roles import RolePools
from rayzero.orchestrator.control.steps import StepReports
from rayzero.orchestrator.control.vaults import VaultManager
from rayzero.orchestrator.control.weight_versions import WeightVersions
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.job_events import GenerationStarted, Reattached, WorkersReady
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.policies.attachment import Attachment
from rayzero.orchestrator.policies.membership import Selected
from rayzero.orchestrator.policies.placement import HAS_LEFT_ITS_LOOP

if TYPE_CHECKING:  # it imports Ray, without which the controller is tested
    from rayzero.orchestrator.cluster.worker_group import WorkerGroup


@dataclass(eq=False)
class Reattachment:
    """Used once, by a controller whose job trains already."""

    _plan: JobPlan
    _loop: JobLoop
    _members: Members
    _events: EventBus
    _workers: WorkerGroup
    _steps: StepReports
    _failures: FailureHandler
    _vaults: VaultManager
    _inbox: WorkerInbox
    _dispatcher: MessageDispatcher
    _pins: CheckpointPins
    _checkpoints: CheckpointWriter
    _versions: WeightVersions
    _roles: RolePools

    def begin(self, found: Attachment, offline_s: float) -> None:
        """Takes over the newest generation, as its members describe it. No message is read before
        `resume`."""
        registry, facts = self._members.registry, self._events.facts
        spec = found.generation
        registry.add((*found.workers, *found.lost))
        registry.calls = found.calls()
        if spec.parts:
            registry.limits = replace(registry.limits, parts=spec.parts)
        generation = self._members.generation = GenerationState(
            spec.generation,
            Selected(found.members),
            found.assignments(),
            spec.restore,
            self._loop.changed.notify,
        )
        registry.members = generation.selection.indices
        generation.active = {status.info.index for status in found.present}
        self._vaults.used_addresses = found.vault_addresses()
        step = max(facts.step, found.step)
        generation.advance_to(step + 1)
        self._roles.rollouts.address = spec.rollouts
        lost = tuple(sorted(generation.assignments[worker.index].rank for worker in found.lost))
        roles = Counter(status.role for status in found.roles if status.number is not None)
        self._events.emit(GenerationStarted(tuple(worker.node for worker in found.members)))
        self._events.emit(
            Reattached(
                step,
                generation.number,
                generation.world_size,
                max(0.0, offline_s),
                lost,
                {role: roles[role] for role in self._roles.by_name},
            )
        )
        self._steps.continue_generation(generation, facts.step, step, spec.shares)
        self._events.emit(WorkersReady(found.workers))

    async def resume(self, found: Attachment) -> None:
        """Continues the generation, or repairs it if it is not whole."""
        await self._vaults.open_attached()
        roles = (status.info for status in found.roles)
        for node in {worker.node_id for worker in (*found.workers, *roles)}:
            self._loop.spawn(self._vaults.open_with_retries(node, lambda: True))
        held = await self._vaults.inventory()
        self._versions.resume(held)
        self._roles.resume(found.roles)
        for worker in found.lost:  # the agents may have reported it, with the cause
            self._failures.on_worker_lost(worker.index, "")
        self._inbox.start(worker.index for worker in found.workers)
        for status in found.present:
            for message in status.messages:
                self._dispatcher.dispatch(status.info.index, message)
        limits = self._members.registry.limits
        most = limits.max + limits.spares
        need = replace(self._plan.resources, min_workers=limits.min, max_workers=most)
        self._workers.resume(need)
        self._loop.spawn(self._checkpoints.find_newest())
        self._pins.resume(held)
        generation = self._members.generation
        if not (found.is_whole or generation.fenced):
            self._failures.renew("controller")
        self._failures.retire(found.useless, HAS_LEFT_ITS_LOOP)
