"""Workers come and go: newcomers, replacements, another size, nodes that are leaving."""

from __future__ import annotations

from contextlib import suppress

from rayzero.orchestrator import machine
from rayzero.orchestrator.control.context import JobContext, WorkerUnavailableError
from rayzero.orchestrator.control.failures import FailureHandler
from rayzero.orchestrator.control.inbox import WorkerInbox
from rayzero.orchestrator.control.vaults import VaultManager
from rayzero.orchestrator.interfaces import WorkerLostError
from rayzero.orchestrator.job_events import JobWarning, LimitsChanged, WorkersReady
from rayzero.orchestrator.machine import State
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
        context: JobContext,
        failures: FailureHandler,
        vaults: VaultManager,
        inbox: WorkerInbox,
    ) -> None:
        self._context = context
        self._failures = failures
        self._vaults = vaults
        self._inbox = inbox
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
        ctx = self._context
        spares = ctx.registry.limits.spares
        ctx.registry.limits = WorkerLimits(least, most, spares)
        ctx.deps.workers.resize(least, most + spares)
        ctx.emit(LimitsChanged(least, most))
        ctx.changed.notify()

    def release_not_chosen(self) -> None:
        """A generation was formed: lets those go who were left out of it."""
        ctx, selection = self._context, self._context.generation.selection
        for worker in selection.surplus:
            if ctx.registry.is_alive(worker.index):
                ctx.registry.remove(worker.index)
                ctx.tasks.spawn(self._release_worker(worker.index))
        for worker in selection.displaced:
            if ctx.registry.is_alive(worker.index):
                ctx.registry.remove(worker.index)
                ctx.tasks.spawn(self._relocate(worker))
        ctx.changed.notify()

    async def _admit_joining(self) -> None:
        ctx = self._context
        while True:
            try:
                worker = await ctx.deps.workers.next_worker()
            except WorkerLostError as lost:
                ctx.emit(JobWarning(str(lost)))
                continue
            ctx.tasks.spawn(self._admit(worker))

    async def _admit(self, worker: WorkerInfo) -> None:
        """A worker is ready once its node has a vault."""
        ctx = self._context
        await self._vaults.open_with_retries(worker.node_id, lambda: True)
        ctx.registry.add([worker])
        self._inbox.subscribe([worker.index])
        ctx.emit(WorkersReady((worker,)))
        ctx.changed.notify()

    async def _watch_draining_nodes(self) -> None:
        ctx = self._context
        while True:
            leaving = await ctx.deps.workers.draining_nodes()
            for node in sorted(leaving - ctx.registry.draining_nodes):
                for name in {one.node for one in ctx.registry.ready if one.node_id == node}:
                    ctx.emit(JobWarning(f"node {name} is leaving: its work moves to other nodes"))
            if leaving != ctx.registry.draining_nodes:
                ctx.registry.draining_nodes = leaving
                ctx.changed.notify()
            await ctx.deps.clock.sleep(DRAIN_POLL_INTERVAL_S)

    async def _propose_resizes(self) -> None:
        """Asks for a resize when there is a reason, once for each generation."""
        ctx = self._context
        while True:
            await ctx.changed.wait_until(lambda: bool(self._resize_reason()))
            if self._would_grow:
                await ctx.deps.clock.sleep(JOIN_BATCH_S)
            generation = ctx.generation
            if reason := self._resize_reason():
                ctx.post_event(machine.ResizeRequested(generation.number, reason))
                await ctx.changed.wait_until(
                    lambda old=generation: (
                        ctx.generation is not old  # type: ignore[misc]
                        or ctx.state is not State.RUNNING
                    )
                )

    async def _start_replacements(self) -> None:
        """Starts replacements, but never beside a repair that can do without them: their imports
        would compete with it."""
        ctx = self._context
        while True:
            await ctx.changed.wait_until(
                lambda: bool(ctx.registry.awaiting_replacement) and self._may_replace
            )
            if ctx.is_running:
                await ctx.wait_for(
                    REPLACE_DELAY_S, lambda: self._has_progressed or not ctx.is_running
                )
            if not self._may_replace:
                continue
            await self._failures.wait_killed()  # a seat is given to another only when it is empty
            vacant, ctx.registry.awaiting_replacement = ctx.registry.awaiting_replacement, []
            for worker in vacant:
                self._replace(worker)

    @property
    def _may_replace(self) -> bool:
        ctx = self._context
        if ctx.is_running:
            return True
        waiting = (State.STARTING, State.RECOVERING, State.RESIZING)
        return ctx.state in waiting and isinstance(ctx.registry.select_members(), NotEnough)

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
        ctx = self._context
        generation = ctx.generation
        if not ctx.is_running or not generation.all_restored or generation.any_finished:
            return ""
        if self._vaults.address_changed:
            return "a vault is to be filled again"
        choice = ctx.registry.select_members()
        if isinstance(choice, NotEnough):
            return ""
        now, then = generation.members, choice.indices
        if now == then:
            return ""
        if any(worker.node_id in ctx.registry.draining_nodes for worker in generation.workers):
            return "a node is leaving"
        return f"from {len(now)} to {len(then)} workers"

    def _replace(self, worker: WorkerInfo) -> None:
        """A new worker in the seat of one that is gone; none where there are enough without it."""
        ctx = self._context
        wanted = ctx.registry.limits
        if len(ctx.registry.ready) >= wanted.max + wanted.spares:
            ctx.tasks.spawn(self._release_worker(worker.index))
            return
        window_s = ctx.plan.spec.recovery.fault_window_s
        record, now_s = self._failures.history, ctx.now_s()
        nodes = {*ctx.registry.nodes, worker.node_id}
        bad = placement.quarantined_nodes(record, nodes, window_s, now_s)
        for node in sorted(bad - self._quarantined):
            ctx.emit(JobWarning(self._quarantine_text(node)))
        self._quarantined = bad
        delay_s = placement.restart_backoff_s(record, worker.node_id, window_s, now_s)
        avoid = sorted(bad | ctx.registry.draining_nodes)
        ctx.deps.workers.replace(worker.index, delay_s, avoid)

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
