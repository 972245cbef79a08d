"""Workers come and go: newcomers, replacements, another size, nodes that are leaving."""

from __future__ import annotations

from contextlib import suppress

from rayzero.orchestrator import events as ev
from rayzero.orchestrator.control.context import JobContext, WorkerUnavailableError
from rayzero.orchestrator.control.failures import FailureHandler
from rayzero.orchestrator.control.inbox import WorkerInbox
from rayzero.orchestrator.control.reconfigure import Reconfiguration
from rayzero.orchestrator.control.vaults import VaultManager
from rayzero.orchestrator.events import State
from rayzero.orchestrator.interfaces import WorkerLostError
from rayzero.orchestrator.job_events import JobWarning, WorkersReady
from rayzero.orchestrator.policies import placement
from rayzero.orchestrator.policies.membership import NotEnough, Selected, WorkerLimits
from rayzero.workers.messages import WorkerInfo

JOIN_BATCH_S = 0.5
"""How long a newcomer waits for others that come at about the same time: one resize for all."""
REPLACE_DELAY_S = 10.0
"""How long a replacement waits at most for the first step behind a repair to be finished."""
DRAIN_POLL_INTERVAL_S = 2.0
"""How often the cluster is asked for nodes that are about to go."""


class ElasticScaler:
    """Wants another membership whenever the policy would choose one, and sees to the seats.

    A resize costs a step boundary and a reload, and is only wanted where every member has an
    engine: a training function without one has no state that could move.
    """

    def __init__(
        self,
        desk: JobContext,
        faults: FailureHandler,
        vaults: VaultManager,
        passage: Reconfiguration,
        watch: WorkerInbox,
    ) -> None:
        self._context = desk
        self._failures = faults
        self._vaults = vaults
        self._reconfiguration = passage
        self._inbox = watch
        self._quarantined: frozenset[str] = frozenset()

    def start(self) -> None:
        """From the first placement on."""
        for work in (
            self._admit_joining(),
            self._watch_draining_nodes(),
            self._propose_resizes(),
            self._start_replacements(),
        ):
            self._context.tasks.spawn(work)

    def set_limits(self, least: int, most: int) -> None:
        """Other limits from now on."""
        desk = self._context
        spares = desk.registry.limits.spares
        desk.registry.limits = WorkerLimits(least, most, spares)
        desk.deps.workers.resize(least, most + spares)
        desk.deps.probe.limited(least, most)
        desk.changed.notify()

    def release_not_chosen(self) -> None:
        """A generation was formed: lets those go who were left out of it."""
        desk, left_out = self._context, self._reconfiguration.not_chosen
        self._reconfiguration.not_chosen = Selected(())
        for worker in left_out.surplus:
            if desk.registry.is_alive(worker.index):
                desk.registry.remove(worker.index)
                desk.tasks.spawn(self._release_worker(worker.index))
        for worker in left_out.displaced:
            if desk.registry.is_alive(worker.index):
                desk.registry.remove(worker.index)
                desk.tasks.spawn(self._relocate(worker))
        desk.changed.notify()

    async def _admit_joining(self) -> None:
        desk = self._context
        while True:
            try:
                worker = await desk.deps.workers.next_worker()
            except WorkerLostError as lost:
                desk.emit(JobWarning(str(lost)))
                continue
            desk.tasks.spawn(self._admit(worker))

    async def _admit(self, worker: WorkerInfo) -> None:
        """A worker is ready once its node has a vault."""
        desk = self._context
        await self._vaults.open_with_retries(worker.node_id, lambda: True)
        desk.registry.add([worker])
        self._inbox.subscribe([worker.index])
        desk.emit(WorkersReady((worker,)))
        desk.changed.notify()

    async def _watch_draining_nodes(self) -> None:
        desk = self._context
        while True:
            leaving = await desk.deps.workers.draining_nodes()
            for node in sorted(leaving - desk.registry.draining_nodes):
                for name in {one.node for one in desk.registry.ready if one.node_id == node}:
                    desk.emit(JobWarning(f"node {name} is leaving: its work moves to other nodes"))
            if leaving != desk.registry.draining_nodes:
                desk.registry.draining_nodes = leaving
                desk.changed.notify()
            await desk.deps.clock.sleep(DRAIN_POLL_INTERVAL_S)

    async def _propose_resizes(self) -> None:
        """Asks for a resize when there is a reason, once for each generation."""
        desk = self._context
        while True:
            await desk.changed.wait_until(lambda: bool(self._resize_reason()))
            if self._would_grow:
                await desk.deps.clock.sleep(JOIN_BATCH_S)
            generation = desk.generation
            if reason := self._resize_reason():
                desk.post_event(ev.ResizeRequested(generation.number, reason))
                await desk.changed.wait_until(
                    lambda old=generation: (
                        desk.generation is not old  # type: ignore[misc]
                        or desk.job.state is not State.RUNNING
                    )
                )

    async def _start_replacements(self) -> None:
        """Starts replacements, but never beside a repair that can do without them: their imports
        would compete with it."""
        desk = self._context
        while True:
            await desk.changed.wait_until(
                lambda: bool(desk.registry.awaiting_replacement) and self._may_replace
            )
            if desk.is_running:
                await desk.wait_for(
                    REPLACE_DELAY_S, lambda: self._has_progressed or not desk.is_running
                )
            if not self._may_replace:
                continue
            await self._failures.wait_killed()  # a seat is given to another only when it is empty
            vacant, desk.registry.awaiting_replacement = desk.registry.awaiting_replacement, []
            for worker in vacant:
                self._replace(worker)

    @property
    def _may_replace(self) -> bool:
        desk = self._context
        if desk.is_running:
            return True
        waiting = (State.STARTING, State.RECOVERING, State.RESIZING)
        return desk.job.state in waiting and isinstance(desk.registry.select_members(), NotEnough)

    @property
    def _has_progressed(self) -> bool:
        """Whether the newest generation has finished a step."""
        restore = self._context.generation.restore
        return self._context.progress.steps > (restore.step if restore is not None else 0)

    @property
    def _would_grow(self) -> bool:
        choice = self._context.registry.select_members()
        here = self._context.generation.world_size
        return isinstance(choice, Selected) and len(choice.members) > here

    def _resize_reason(self) -> str:
        """Why another membership would be better now; empty when none would."""
        desk = self._context
        generation = desk.generation
        if not desk.is_running or not generation.all_restored or generation.any_finished:
            return ""
        if self._vaults.address_changed:
            return "a vault is to be filled again"
        choice = desk.registry.select_members()
        if isinstance(choice, NotEnough):
            return ""
        now, then = generation.members, choice.indices
        if now == then:
            return ""
        if any(worker.node_id in desk.registry.draining_nodes for worker in generation.workers):
            return "a node is leaving"
        return f"from {len(now)} to {len(then)} workers"

    def _replace(self, worker: WorkerInfo) -> None:
        """A new worker in the seat of one that is gone; none where there are enough without it."""
        desk = self._context
        wanted = desk.registry.limits
        if len(desk.registry.ready) >= wanted.max + wanted.spares:
            desk.tasks.spawn(self._release_worker(worker.index))
            return
        window_s = desk.plan.spec.recovery.fault_window_s
        record, now_s = self._failures.history, desk.now_s()
        nodes = {*desk.registry.nodes, worker.node_id}
        bad = placement.quarantined_nodes(record, nodes, window_s, now_s)
        for node in sorted(bad - self._quarantined):
            desk.emit(JobWarning(self._quarantine_text(node)))
        self._quarantined = bad
        delay_s = placement.restart_backoff_s(record, worker.node_id, window_s, now_s)
        avoid = sorted(bad | desk.registry.draining_nodes)
        desk.deps.workers.replace(worker.index, delay_s, avoid)

    def _quarantine_text(self, node: str) -> str:
        names = [one.worker.node for one in self._failures.history if one.worker.node_id == node]
        return (
            f"node {names[0]} had {placement.QUARANTINE_FAULTS} hardware faults or more within "
            f"recovery.fault_window_s: no replacement is started there"
        )

    async def _relocate(self, worker: WorkerInfo) -> None:
        await self._end_worker(worker.index, kill=True)
        self._replace(worker)

    async def _release_worker(self, worker: int) -> None:
        await self._end_worker(worker, kill=False)

    async def _end_worker(self, worker: int, *, kill: bool) -> None:
        group = self._context.deps.workers
        with suppress(WorkerUnavailableError):
            await self._context.call_worker(
                worker, group.kill(worker) if kill else group.release_worker(worker)
            )
