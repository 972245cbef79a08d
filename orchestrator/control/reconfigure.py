"""Reconfiguration: the one coroutine that leads from a fault or a resize to the next generation.

`Reconfiguration._reconfigure` reads in the order things happen: fence or drain the generation,
select the step to resume from, select the members, rendezvous. Loading the state and recomputing
steps is the members' work; `GenerationState` follows it. A further fault cancels the coroutine and
begins it again: a cancelled attempt emits nothing more, and the next one begins when it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rayzero.orchestrator import machine
from rayzero.orchestrator.aio import PendingReplies, yield_if_large
from rayzero.orchestrator.control.context import JobContext
from rayzero.orchestrator.control.failures import FailureHandler, StragglerMonitor
from rayzero.orchestrator.control.generation import GenerationState, RecoveryTimer
from rayzero.orchestrator.control.inbox import WorkerInbox
from rayzero.orchestrator.control.restore import ResumePoint, ResumePointSelector
from rayzero.orchestrator.control.vaults import VaultManager
from rayzero.orchestrator.job_events import GenerationStarted, JobWarning
from rayzero.orchestrator.policies.membership import NotEnough, Selected, not_enough_error
from rayzero.orchestrator.policies.placement import assign_ranks
from rayzero.workers.messages import GenerationSpec, RankAssignment, WorkerCalls

FENCE_TIMEOUT_S = 10.0
"""How long the survivors of a fault may take to unwind before they are killed."""


class Reconfiguration:
    """Owns the current attempt to form a generation, and is the only writer of
    `JobContext.generation`.

    Survivors of a fault wait for nothing but each other and one reply each: placements, addresses
    and slots are computed here, from what the controller knows already.
    """

    def __init__(
        self,
        context: JobContext,
        failures: FailureHandler,
        vaults: VaultManager,
        resume_point: ResumePointSelector,
        inbox: WorkerInbox,
        stragglers: StragglerMonitor,
        timer: RecoveryTimer,
    ) -> None:
        self._context = context
        self._failures = failures
        self._vaults = vaults
        self._resume_point = resume_point
        self._inbox = inbox
        self._stragglers = stragglers
        self._timer = timer
        self._attempt: asyncio.Task[None] | None = None
        self._assignments = PendingReplies()
        """The replies of the newest generation's members to their assignments."""

    def form_first(self) -> None:
        self._begin(None)

    def recover(self) -> None:
        """Fences the generation, and forms the next one from what is left."""
        # Before anything else: unwinding is what the next generation waits for longest.
        self.interrupt_members(self._context.generation.active)
        self._begin(self._fence)

    def resize(self) -> None:
        """Drains the generation, and forms the next one with other members."""
        self._begin(self._drain)

    def cancel(self) -> None:
        """Ends the current attempt: the job is being stopped, or the next attempt begins."""
        if self._attempt is not None:
            self._attempt.cancel()

    def interrupt_members(self, workers: frozenset[int], *, softly: bool = False) -> None:
        """Tells members to leave, each once it has its assignment: it would begin it otherwise.

        Args:
            softly: let them finish the collective they are in.
        """
        ctx, assignments = self._context, self._assignments
        generation = ctx.generation.number
        method = WorkerCalls.stop if softly else WorkerCalls.fence

        def leave(members: frozenset[int]) -> None:
            replies = ctx.deps.workers.broadcast(members, method, generation)
            ctx.tasks.spawn(ctx.await_replies(replies))

        if assigned := workers - assignments.pending:
            leave(assigned)
        if assigned < workers:
            ctx.tasks.spawn(self._interrupt_when_assigned(workers - assigned, assignments, leave))

    async def _interrupt_when_assigned(
        self,
        workers: frozenset[int],
        assignments: PendingReplies,
        leave: Callable[[frozenset[int]], None],
    ) -> None:
        while workers:
            await assignments.wait_any(workers)
            assigned = workers - assignments.pending
            leave(assigned)
            workers -= assigned

    def _begin(self, unwind: Callable[[], Awaitable[None]] | None) -> None:
        self.cancel()
        self._attempt = self._context.tasks.spawn(self._reconfigure(unwind, self._attempt))

    async def _reconfigure(
        self, unwind: Callable[[], Awaitable[None]] | None, cancelled: asyncio.Task[None] | None
    ) -> None:
        """From the end of one generation to GenerationFormed of the next."""
        if cancelled is not None:
            await asyncio.wait([cancelled])
        if unwind is not None:
            await unwind()
        if self._context.generation.all_finished:
            return  # while it was drained: the job is done, and AllFinished says so
        self._enter_phase("select_step")
        resume = await self._resume_point.select()
        self._enter_phase("select_members")
        selection = await self._select_members()
        self._enter_phase("rendezvous")
        generation = await self._rendezvous(selection, resume)
        await self._context.changed.wait_until(lambda: generation.all_joined)
        if not generation.fenced:  # else FaultRecoverable is in the queue: another attempt begins
            self._context.post_event(machine.GenerationFormed(generation.number))

    async def _fence(self) -> None:
        """Returns once the generation can do nothing more, whatever state it was in."""
        self._enter_phase("fence")
        generation = self._context.generation
        if not await self._context.wait_for(FENCE_TIMEOUT_S, lambda: generation.all_left):
            for worker in generation.active:
                self._failures.expel(worker, f"it did not unwind within {FENCE_TIMEOUT_S:g} s")
        await self._failures.wait_killed()

    async def _drain(self) -> None:
        """Returns once all members left at the end of a step. Without a limit: a step may take any
        time, and the hang detector finds a hang."""
        self._enter_phase("drain")
        ctx, generation = self._context, self._context.generation
        drained = ctx.deps.workers.broadcast(
            generation.active, WorkerCalls.drain, generation.number
        )
        ctx.tasks.spawn(ctx.await_replies(drained))
        await ctx.changed.wait_until(lambda: generation.all_left)

    async def _select_members(self) -> Selected:
        """Survivors, ready spares and newcomers; waits for replacements where they are too few.

        Raises:
            JobFailedError: they are still too few after `workers.start_timeout_s`.
        """
        registry = self._context.registry
        limit_s = self._context.plan.resources.timeout_s
        selection = registry.select_members()
        if isinstance(selection, NotEnough):
            self._context.emit(
                JobWarning(
                    f"{selection.available} of at least {registry.limits.min} workers are left: "
                    f"waiting up to {limit_s:g} s for replacements (workers.start_timeout_s)"
                )
            )
            await self._context.wait_for(
                limit_s, lambda: isinstance(registry.select_members(), Selected)
            )
            selection = registry.select_members()
        if isinstance(selection, NotEnough):
            raise not_enough_error(selection, registry.limits, limit_s)
        return selection

    async def _rendezvous(self, selection: Selected, resume: ResumePoint) -> GenerationState:
        """Begins the generation, and sends every member its assignment."""
        ctx, members = self._context, selection.members
        placements = assign_ranks(members)
        await yield_if_large(len(members))
        generation = ctx.generation = GenerationState(
            ctx.generation.number + 1, selection, placements, resume.restore
        )
        ctx.registry.members = generation.members
        ctx.emit(GenerationStarted(tuple(worker.node for worker in generation.workers)))
        for record in ctx.progress.start_generation(
            generation.number, generation.world_size, resume.step
        ):
            ctx.emit(record)
        if lost := [index for index in generation.members if not ctx.registry.is_alive(index)]:
            for worker in lost:
                self._failures.on_member_missing(worker)
            return generation  # never joined by all; the fault begins another attempt
        self._inbox.start_generation()
        shares = self._stragglers.start_generation(generation.workers)
        store_worker, store_port = resume.store or (None, 0)
        if store_worker not in generation.members:
            store_worker = placements[0].worker
            store_port = await ctx.call_worker(
                store_worker, ctx.deps.workers.call(store_worker, WorkerCalls.open_store)
            )
        self._vaults.generation_uses(worker.node_id for worker in members)
        spec = GenerationSpec(
            generation=generation.number,
            world_size=generation.world_size,
            store_host=ctx.registry.info(store_worker).ip,
            store_port=store_port,
            restore=resume.restore,
            shares=shares,
            remote=ctx.replicates,
            faults=ctx.injected_faults,
        )
        generation.mark_assigned()
        self._assignments = ctx.deps.workers.assign(spec, self._rank_assignments(generation))
        ctx.tasks.spawn(ctx.await_replies(self._assignments))
        return generation

    def _rank_assignments(self, generation: GenerationState) -> dict[int, RankAssignment]:
        """What differs from member to member, by worker."""
        vaults = self._context.vault_addresses
        return {
            place.worker: RankAssignment(
                place.rank, place.local_rank, place.local_world_size, vaults.get(worker.node_id, "")
            )
            for place, worker in zip(generation.placements, generation.workers, strict=True)
        }

    def _enter_phase(self, phase: str) -> None:
        self._timer.enter_phase(phase, self._context.now_s())
