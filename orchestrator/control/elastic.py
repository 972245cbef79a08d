"""Elasticity: admits new workers, requests resizes, watches draining nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rayzero.orchestrator import machine
from rayzero.orchestrator.control.inbox import WorkerInbox
from rayzero.orchestrator.control.loop import JobLoop, JobMachine
from rayzero.orchestrator.control.members import Members
from rayzero.orchestrator.control.newcomers import Newcomers
from rayzero.orchestrator.control.node_health import NodeHealth
from rayzero.orchestrator.control.replacements import Replacements
from rayzero.orchestrator.control.vaults import VaultManager
from rayzero.orchestrator.errors import WorkerLostError
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.job_events import LimitsChanged, WorkersReady
from rayzero.orchestrator.machine import State
from rayzero.workers.messages import WorkerInfo

if TYPE_CHECKING:  # it imports Ray, without which the controller is tested
    from rayzero.orchestrator.cluster.worker_group import WorkerGroup

JOIN_BATCH_S = 0.5
"""How long a resize waits for further changes, so that one resize serves all of them."""
DRAIN_POLL_INTERVAL_S = 2.0
"""How often the cluster is asked for draining nodes."""

HEAD_LIMIT_S = 10.0
"""After this time without an answer the cluster's head counts as away."""


@dataclass(eq=False)
class ElasticScaler:
    """Requests a resize whenever the membership policy would select other members.

    A resize costs a step boundary and a reload. It is requested only if every member has an engine:
    a training function without one has no state that could be resharded.
    """

    _loop: JobLoop
    _machine: JobMachine
    _members: Members
    _workers: WorkerGroup
    _events: EventBus
    _vaults: VaultManager
    _inbox: WorkerInbox
    _newcomers: Newcomers
    _replacements: Replacements
    health: NodeHealth

    def start(self) -> None:
        """Starts the background tasks, once the first workers are placed."""
        for work in (
            self._admit_joining(),
            self._watch_draining_nodes(),
            self._propose_resizes(),
            self._replacements.run(),
        ):
            self._loop.spawn(work)

    def set_limits(self, min_workers: int, max_workers: int) -> None:
        """Changes the limits, and requests or gives up workers accordingly."""
        registry = self._members.registry
        limits = registry.limits = replace(registry.limits, min=min_workers, max=max_workers)
        registry.try_again()
        self._workers.resize(min_workers, max_workers + limits.spares)
        self._events.emit(LimitsChanged(min_workers, max_workers))

    def release_not_chosen(self) -> None:
        """Ends the workers that the formed generation does not need, unless the limits have changed
        since and need them again."""
        registry, selection = self._members.registry, self._members.generation.selection
        if (now := registry.select_members()) is None:
            return
        ends = dict.fromkeys(now.surplus, self._replacements.release)
        ends |= dict.fromkeys(now.displaced, self._replacements.relocate)
        for worker in (*selection.surplus, *selection.displaced):
            if (end := ends.get(worker)) is not None:
                registry.remove(worker.index)
                self._loop.spawn(end(worker))

    async def _admit_joining(self) -> None:
        while True:
            try:
                worker = await self._workers.next_worker()
            except WorkerLostError as lost:
                self._events.warn(str(lost))
                continue
            self._loop.spawn(self._admit(worker))

    async def _admit(self, worker: WorkerInfo) -> None:
        """Adds a worker to the ready ones, once its node has a vault."""
        await self._vaults.open_with_retries(worker.node_id, lambda: True)
        await self.health.look_at([worker])
        self._members.registry.add([worker])
        self._inbox.subscribe([worker.index])
        self._events.emit(WorkersReady((worker,)))
        if self._machine.is_running and worker.node_id in self._members.registry.avoided_nodes:
            self._members.registry.remove(worker.index)
            self._loop.spawn(self._replacements.relocate(worker))

    async def _watch_draining_nodes(self) -> None:
        registry = self._members.registry
        while True:
            if (draining := await self._draining_nodes()) is None:
                continue
            await self._workers.leave_nodes(draining)
            for node in sorted(draining - registry.draining_nodes):
                for name in {w.node for w in registry.ready if w.node_id == node}:
                    self._events.warn(f"node {name} is draining: its work moves to other nodes")
            if draining != registry.draining_nodes:
                registry.draining_nodes = draining
            await self._loop.sleep(DRAIN_POLL_INTERVAL_S)

    async def _draining_nodes(self) -> frozenset[str] | None:
        """Returns the draining nodes; None while the cluster's head does not answer. Warns once
        when the head stops answering, and once when it answers again."""
        registry = self._members.registry
        try:
            draining = await self._loop.within(HEAD_LIMIT_S, self._workers.draining_nodes())
        except TimeoutError:
            if registry.head_answers:
                self._events.warn(
                    f"the cluster's head has not answered for {HEAD_LIMIT_S:g} s: training goes "
                    "on, and lost workers are replaced once it answers"
                )
            registry.head_answers = False
            return None
        if not registry.head_answers:
            self._events.warn("the cluster's head answers again")
        registry.head_answers = True
        return draining

    async def _propose_resizes(self) -> None:
        """Asks for a resize when there is a reason, once for each generation."""
        while True:
            await self._loop.wait_until(lambda: bool(self._resize_reason()))
            if self._would_grow:
                await self._loop.sleep(JOIN_BATCH_S)
            if not (self._resize_reason() and await self._newcomers.prepare()):
                continue
            generation = self._members.generation
            if reason := self._resize_reason():
                self._machine.post(machine.ResizeRequested(generation.number, reason))
                await self._loop.wait_until(
                    lambda old=generation: (
                        self._members.generation is not old  # type: ignore[misc]
                        or self._machine.state is not State.RUNNING
                    )
                )

    @property
    def _would_grow(self) -> bool:
        selection = self._members.registry.select_members()
        world_size = self._members.generation.world_size
        return selection is not None and len(selection.members) > world_size

    def _resize_reason(self) -> str:
        """Returns why other members would be better now; empty if they would not."""
        generation, registry = self._members.generation, self._members.registry
        if not self._machine.is_running or not generation.all_restored or generation.finished:
            return ""
        if self._vaults.address_changed():
            return "a vault was restarted and is empty"
        selection = registry.select_members()
        old = generation.selection.indices
        if selection is None or selection.indices == old:
            return ""
        if any(worker.node_id in registry.draining_nodes for worker in generation.workers):
            return "a node is draining"
        if any(worker.node_id in registry.avoided_nodes for worker in generation.workers):
            return "a node fails its health check"
        return f"from {len(old)} to {len(selection.indices)} workers"
