"""Elasticity: admits new workers, starts replacements, requests resizes, watches draining nodes."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from rayzero.orchestrator import machine
from rayzero.orchestrator.control.context import JobContext, WorkerUnavailableError
from rayzero.orchestrator.control.failures import FailureHandler
from rayzero.orchestrator.control.inbox import WorkerInbox
from rayzero.orchestrator.control.vaults import VaultManager
from rayzero.orchestrator.errors import WorkerLostError
from rayzero.orchestrator.job_events import LimitsChanged, WorkersReady
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.policies import placement
from rayzero.orchestrator.policies.placement import CallState, FunctionCall, misplaced
from rayzero.workers.messages import GenerationSpec, WorkerInfo

JOIN_BATCH_S = 0.5
"""How long a resize waits for further changes, so that one resize serves all of them."""
REPLACE_DELAY_S = 10.0
"""Longest wait of a replacement for the first step after a recovery."""
DRAIN_POLL_INTERVAL_S = 2.0
"""How often the cluster is asked for draining nodes."""


@dataclass(eq=False)
class ElasticScaler:
    """Requests a resize whenever the membership policy would select other members.

    A resize costs a step boundary and a reload. It is requested only if every member has an engine:
    a training function without one has no state that could be resharded.
    """

    _context: JobContext
    _failures: FailureHandler
    _vaults: VaultManager
    _inbox: WorkerInbox
    _quarantined: frozenset[str] = frozenset()

    def start(self) -> None:
        """Starts the background tasks, once the first workers are placed."""
        for work in (
            self._admit_joining(),
            self._watch_draining_nodes(),
            self._propose_resizes(),
            self._start_replacements(),
        ):
            self._context.tasks.spawn(work)

    def set_limits(self, min_workers: int, max_workers: int) -> None:
        ctx = self._context
        limits = replace(ctx.registry.limits, min=min_workers, max=max_workers)
        ctx.registry.limits = limits
        ctx.registry.try_again()
        ctx.deps.workers.resize(min_workers, max_workers + limits.spares)
        ctx.emit(LimitsChanged(min_workers, max_workers))

    def release_not_chosen(self) -> None:
        """A generation was formed: ends the workers it does not need."""
        ctx, selection = self._context, self._context.generation.selection
        for worker in (*selection.surplus, *selection.displaced):
            if ctx.registry.is_alive(worker.index):
                ctx.registry.remove(worker.index)
                displaced = worker in selection.displaced
                ctx.tasks.spawn(self._relocate(worker) if displaced else self._release(worker))

    async def _admit_joining(self) -> None:
        ctx = self._context
        while True:
            try:
                worker = await ctx.deps.workers.next_worker()
            except WorkerLostError as lost:
                ctx.warn(str(lost))
                continue
            ctx.tasks.spawn(self._admit(worker))

    async def _admit(self, worker: WorkerInfo) -> None:
        """A worker is ready once its node has a vault."""
        ctx = self._context
        await self._vaults.open_with_retries(worker.node_id, lambda: True)
        ctx.registry.add([worker])
        self._inbox.subscribe([worker.index])
        ctx.emit(WorkersReady((worker,)))

    async def _watch_draining_nodes(self) -> None:
        ctx = self._context
        while True:
            draining = await ctx.deps.workers.draining_nodes()
            for node in sorted(draining - ctx.registry.draining_nodes):
                for name in {w.node for w in ctx.registry.ready if w.node_id == node}:
                    ctx.warn(f"node {name} is draining: its work moves to other nodes")
            if draining != ctx.registry.draining_nodes:
                ctx.registry.draining_nodes = draining
            await ctx.deps.clock.sleep(DRAIN_POLL_INTERVAL_S)

    async def _propose_resizes(self) -> None:
        """Asks for a resize when there is a reason, once for each generation."""
        ctx = self._context
        while True:
            await ctx.changed.wait_until(lambda: bool(self._resize_reason()))
            if self._would_grow:
                await ctx.deps.clock.sleep(JOIN_BATCH_S)
            if not (self._resize_reason() and await self._prepare_newcomers()):
                continue
            generation = ctx.generation
            if reason := self._resize_reason():
                ctx.post_event(machine.ResizeRequested(generation.number, reason))
                await ctx.changed.wait_until(
                    lambda old=generation: (
                        ctx.generation is not old  # type: ignore[misc]
                        or ctx.state is not State.RUNNING
                    )
                )

    async def _prepare_newcomers(self) -> bool:
        """Calls the functions of the selected workers that are new, before their generation begins,
        and waits for them up to `workers.start_timeout_s`. Returns whether all of them can begin
        it; if not, others may be selected now.

        What a function does before it trains (imports, its model, its data) takes seconds, which
        the other ranks would wait for. So it is called while they train, with the rank that it is
        going to have, and waits where it needs the training state or the other ranks. Then they are
        drained.
        """
        ctx, registry = self._context, self._context.registry
        selection, generation = registry.select_members(), ctx.generation
        if selection is None or selection.indices.isdisjoint(generation.assignments):
            return True  # no function continues, so that all of them begin at once
        places = ctx.assign(selection)
        if others := [it for it in misplaced(places, registry.calls) if registry.is_ahead(it)]:
            self._failures.retire(others)
            return False
        if new := {worker: it for worker, it in places.items() if worker not in registry.calls}:
            spec = GenerationSpec(
                generation=generation.number + 1,
                world_size=len(places),
                store_host="",
                store_port=0,
                faults=ctx.injected_faults,
                survivors_stay=True,
                parts=registry.limits.parts,
                is_ahead=True,
            )
            state, ranks = CallState.PREPARING, len(places)
            registry.calls = registry.calls | {
                worker: FunctionCall(place.rank, ranks, spec.generation, state)
                for worker, place in new.items()
            }
            ctx.expect_replies(ctx.deps.workers.assign(spec, new))
            selection = registry.select_members()
        ahead = [worker for worker in places if registry.is_ahead(worker)]

        def is_over() -> bool:
            changed = ctx.generation is not generation or not ctx.is_running
            return changed or registry.select_members() != selection or not self._preparing(ahead)

        limit_s = ctx.plan.spec.workers.start_timeout_s
        if not await ctx.wait_for(limit_s, is_over):
            late = f"the training function did not come to its engine within {limit_s:g} s"
            for worker in self._preparing(ahead):
                self._failures.on_newcomer_failed(worker, f"{late} (workers.start_timeout_s)")
            return False
        same = ctx.generation is generation and registry.select_members() == selection
        return same and not self._preparing(ahead)

    def _preparing(self, ahead: Iterable[int]) -> list[int]:
        registry = self._context.registry
        alive = filter(registry.is_alive, ahead)
        return [it for it in alive if registry.calls[it].state is CallState.PREPARING]

    async def _start_replacements(self) -> None:
        """Starts replacements, but not during a recovery that does not need them: their imports
        would compete with it for CPU time."""
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
            await self._failures.wait_killed()  # a reservation is reused only when it is empty
            lost, ctx.registry.awaiting_replacement = ctx.registry.awaiting_replacement, ()
            for worker in lost:
                ctx.tasks.spawn(self._replace_when_free(worker))

    async def _replace_when_free(self, worker: WorkerInfo) -> None:
        await self._failures.wait_device_free(worker.index)
        self._replace(worker)

    @property
    def _may_replace(self) -> bool:
        ctx = self._context
        if ctx.is_running:
            return True
        forming = (State.STARTING, State.RECOVERING, State.RESIZING)
        too_few = bool(ctx.registry.awaited) or ctx.registry.select_members() is None
        return ctx.state in forming and too_few

    @property
    def _has_progressed(self) -> bool:
        """Whether the newest generation has finished a step."""
        restore = self._context.generation.restore
        return self._context.progress.steps > (restore.step if restore is not None else 0)

    @property
    def _would_grow(self) -> bool:
        selection = self._context.registry.select_members()
        world_size = self._context.generation.world_size
        return selection is not None and len(selection.members) > world_size

    def _resize_reason(self) -> str:
        """Why other members would be better now; empty if they would not."""
        ctx = self._context
        generation = ctx.generation
        if not ctx.is_running or not generation.all_restored or generation.finished:
            return ""
        if self._vaults.address_changed():
            return "a vault was restarted and is empty"
        selection = ctx.registry.select_members()
        old = generation.selection.indices
        if selection is None or selection.indices == old:
            return ""
        if any(worker.node_id in ctx.registry.draining_nodes for worker in generation.workers):
            return "a node is draining"
        return f"from {len(old)} to {len(selection.indices)} workers"

    def _replace(self, worker: WorkerInfo) -> None:
        """Starts a worker in the place of one that was lost or retired, unless there are enough."""
        ctx = self._context
        limits = ctx.registry.limits
        if len(ctx.registry.ready) >= limits.max + limits.spares:
            ctx.tasks.spawn(self._release(worker))
            return
        window_s = ctx.plan.spec.recovery.fault_window_s
        history, now_s = self._failures.history, ctx.now_s()
        nodes = {*ctx.registry.nodes, worker.node_id}
        bad = placement.quarantined_nodes(history, nodes, window_s, now_s)
        for node in sorted(bad - self._quarantined):
            ctx.warn(self._quarantine_text(node))
        self._quarantined = bad
        delay_s = 0.0
        if self._failures.was_lost(worker.index):
            delay_s = placement.restart_backoff_s(history, worker.node_id, window_s, now_s)
        avoid = sorted(bad | ctx.registry.draining_nodes)
        ctx.deps.workers.replace(worker.index, delay_s, avoid)

    def _quarantine_text(self, node: str) -> str:
        workers = [fault.worker for fault in self._failures.history]
        name = next(worker.node for worker in workers if worker.node_id == node)
        return (
            f"node {name} had {placement.QUARANTINE_FAULTS} hardware faults or more within "
            f"recovery.fault_window_s: no replacement is started there"
        )

    async def _relocate(self, worker: WorkerInfo) -> None:
        await self._await_end(worker, self._context.deps.workers.kill(worker.index))
        self._replace(worker)

    async def _release(self, worker: WorkerInfo) -> None:
        await self._await_end(worker, self._context.deps.workers.release_worker(worker.index))

    async def _await_end(self, worker: WorkerInfo, ending: Awaitable[None]) -> None:
        with suppress(WorkerUnavailableError):
            await self._context.worker_reply(worker.index, ending)
