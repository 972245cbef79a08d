"""Reconfiguration: the one coroutine that leads from a fault or a resize to the next generation.

`Reconfiguration._reconfigure` reads in the order things happen: fence or drain the generation,
select the step to resume from, select the members, rendezvous. Loading the state and recomputing
steps is the members' work; `GenerationState` follows it. A further fault cancels the coroutine and
begins it again: a cancelled attempt emits nothing more, and the next one begins when it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rayzero.orchestrator import machine
from rayzero.orchestrator.aio import PendingReplies
from rayzero.orchestrator.control.checkpoints import CheckpointWriter
from rayzero.orchestrator.control.context import JobContext, WorkerUnavailableError
from rayzero.orchestrator.control.failures import FailureHandler
from rayzero.orchestrator.control.generation import GenerationState
from rayzero.orchestrator.control.inbox import WorkerInbox
from rayzero.orchestrator.control.restore import RestoreSelector
from rayzero.orchestrator.control.vaults import VaultManager
from rayzero.orchestrator.job_events import GenerationStarted
from rayzero.orchestrator.policies.membership import Selected, not_enough_error
from rayzero.orchestrator.policies.placement import CallState, FunctionCall, misplaced
from rayzero.orchestrator.policies.recovery import newest_complete_in_vaults
from rayzero.workers.calls import WorkerCalls
from rayzero.workers.messages import GenerationSpec, RankAssignment
from rayzero.workers.vault.records import Restore

LEAVE_DELAY_S = 4.0
"""How long a stop waits for the members to leave before it writes the last checkpoint,
from the vaults: a step that ends meanwhile is included."""


@dataclass(eq=False)
class Reconfiguration:
    """Owns the current attempt to form a generation, and is the only writer of
    `JobContext.generation`.

    Survivors of a fault wait for nothing but each other and one reply each: placements, addresses
    and slots are computed here, from what the controller knows already.
    """

    _context: JobContext
    _failures: FailureHandler
    _vaults: VaultManager
    _restore: RestoreSelector
    _inbox: WorkerInbox
    _checkpoints: CheckpointWriter
    _attempt: asyncio.Task[None] | None = None
    _assignments: PendingReplies = field(default_factory=PendingReplies)
    """The replies of the newest generation's members to their assignments."""

    def form_first(self) -> None:
        self._begin(None)

    def recover(self) -> None:
        """Fences the generation, and forms the next one from what is left."""
        # Before anything else: leaving is what the next generation waits for longest.
        self._interrupt_members()
        self._begin(self._fence)

    def resize(self) -> None:
        """Drains the generation, and forms the next one with other members."""
        self._begin(self._drain)

    def stop(self) -> None:
        """Ends the generation on request, and forms no other one."""
        self._cancel_attempt()
        self._context.tasks.spawn(self._stop())

    def _cancel_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.cancel()

    def _interrupt_members(self, *, softly: bool = False) -> None:
        """Tells the active members to leave, each once it has its assignment: it would begin it
        otherwise.

        Args:
            softly: let them finish the collective they are in.
        """
        generation = self._context.generation
        generation.fence(self._context.now_s())
        method = WorkerCalls.stop if softly else WorkerCalls.fence
        members = frozenset(generation.active)
        if assigned := members - self._assignments.pending:
            self._context.broadcast(assigned, method, generation.number)
        if waiting := members - assigned:
            interrupting = self._interrupt_when_assigned(waiting, method, self._assignments)
            self._context.tasks.spawn(interrupting)

    async def _interrupt_when_assigned(
        self,
        members: frozenset[int],
        method: Callable[[Any, int], None],
        assignments: PendingReplies,
    ) -> None:
        generation = self._context.generation.number
        while members:
            await assignments.wait_any(members)
            assigned = members - assignments.pending
            self._context.broadcast(assigned, method, generation)
            members -= assigned

    def _begin(self, unwind: Callable[[], Awaitable[None]] | None) -> None:
        self._cancel_attempt()
        self._attempt = self._context.tasks.spawn(self._reconfigure(unwind, self._attempt))

    async def _reconfigure(
        self, unwind: Callable[[], Awaitable[None]] | None, cancelled: asyncio.Task[None] | None
    ) -> None:
        """Ends a generation with `unwind`, if given, and forms the next, up to GenerationFormed."""
        ctx = self._context
        if cancelled is not None:
            await asyncio.wait([cancelled])
        if unwind is not None:
            await unwind()
        if ctx.generation.all_finished:
            return  # while it was drained: the job is done, and AllFinished says so
        ctx.timer.enter_phase("select_step")
        restore, store, _ = await asyncio.gather(
            self._restore.select(), self._open_store_early(), ctx.numbers.await_reserved()
        )
        ctx.timer.enter_phase("select_members")
        selection = await self._select_members(restore)
        ctx.timer.enter_phase("rendezvous")
        generation = await self._rendezvous(selection, restore, store)
        await ctx.changed.wait_until(lambda: generation.all_joined)
        if not generation.fenced:  # else FaultRecoverable is in the queue: another attempt begins
            ctx.post_event(machine.GenerationFormed(generation.number))

    async def _fence(self) -> None:
        """Returns once the generation can do nothing more, whatever state it was in. Without a
        limit: a survivor may be in a long call, and the hang detector kills those that stay."""
        ctx, generation = self._context, self._context.generation
        ctx.timer.enter_phase("fence")
        await ctx.changed.wait_until(lambda: not generation.active)
        self._failures.on_fenced(generation)
        await self._failures.wait_killed()

    async def _drain(self) -> None:
        """Returns once all members left at the end of a step. Without a limit: a step may take any
        time, and the hang detector finds a hang."""
        ctx, generation = self._context, self._context.generation
        ctx.timer.enter_phase("drain")
        ctx.broadcast(generation.active, WorkerCalls.drain, generation.number)
        await ctx.changed.wait_until(lambda: not generation.active)

    async def _open_store_early(self) -> tuple[int, int] | None:
        """Opens a rendezvous store while the vaults respond, on the worker that gets rank 0 if
        nothing changes. Returns that worker and the port."""
        selection = self._context.registry.select_members()
        if selection is None:
            return None
        worker = selection.members[0].index
        try:
            return worker, await self._open_store(worker)
        except WorkerUnavailableError as lost:  # if it was no member, this attempt continues
            self._failures.on_worker_lost(lost.worker, lost.cause)
            return None

    async def _open_store(self, worker: int) -> int:
        opening = self._context.deps.workers.call(worker, WorkerCalls.open_store)
        return await self._context.worker_reply(worker, opening)

    async def _select_members(self, restore: Restore | None) -> Selected:
        """Survivors, ready spares and newcomers. Ends processes whose functions do not continue,
        and waits for the new ones in their places; for others only where there are too few. A
        function that was called ahead continues only where others wait for it in their loops.

        Raises:
            JobFailedError: they are too few after `workers.start_timeout_s`.
        """
        ctx, registry = self._context, self._context.registry
        while True:
            self._failures.retire(registry.spent(stays=restore is not None))
            selection = await self._await_members(self._wanted())
            assignments = ctx.assign(selection)
            others = {*misplaced(assignments, registry.calls)}
            stay = any(call.is_waiting for call in self._calls_of(assignments))
            ahead = {it.index for it in registry.ready if registry.is_ahead(it.index)}
            others |= ahead.difference(assignments if stay else ())
            if not others:
                return selection
            self._failures.retire(sorted(others))

    def _wanted(self) -> int:
        """The number of workers to wait for, if it is above the least number: as many as there
        were, where functions continue only then; where none continues, all that start in the
        reservations that the job holds, since one that came later would make all begin again;
        otherwise 0."""
        ctx, registry = self._context, self._context.registry
        calls = [registry.calls[it.index] for it in registry.ready if it.index in registry.calls]
        bound = [call.world_size for call in calls if call.is_waiting and call.keeps_rank]
        if bound:
            return max(bound)
        if calls or not registry.calls:
            return 0
        held = [it for it in registry.awaiting_replacement if it.node_id in ctx.vault_addresses]
        return min(registry.limits.max, max(registry.awaited, len(registry.ready) + len(held)))

    async def _await_members(self, wanted: int) -> Selected:
        """Waits for the least number of workers up to `workers.start_timeout_s`; from then on for
        the wanted number twice as long as the first workers took to start.

        Raises:
            JobFailedError: there are fewer than the least number.
        """
        ctx, registry = self._context, self._context.registry
        limit_s, registry.awaited = ctx.plan.resources.timeout_s, max(1, wanted)
        if registry.select_members() is None:
            ctx.warn(
                f"{len(registry.ready)} of at least "
                f"{registry.present_limits.least_above(len(registry.ready))} workers are left: "
                f"waiting up to {limit_s:g} s for replacements (workers.start_timeout_s)"
            )
            if not await ctx.wait_for(limit_s, lambda: registry.select_members() is not None):
                raise not_enough_error(len(registry.ready), registry.present_limits, limit_s)
        if len(registry.ready) < wanted:
            await ctx.wait_for(2 * registry.start_s, lambda: len(registry.ready) >= wanted)
        selection = registry.select_members()
        if selection is None:  # one was lost meanwhile
            return await self._await_members(wanted)
        registry.awaited = 0
        return selection

    async def _rendezvous(
        self, selection: Selected, restore: Restore | None, store: tuple[int, int] | None
    ) -> GenerationState:
        """Begins the generation, and sends every member its assignment."""
        ctx, number = self._context, self._context.numbers.next()
        assignments = ctx.assign(selection)
        notes = ctx.generation.notes(restore.step) if restore is not None else b""
        self._vaults.generation_uses(worker.node_id for worker in selection.members)
        generation = ctx.generation = GenerationState(
            number, selection, assignments, restore, ctx.changed.notify
        )
        ctx.registry.members = selection.indices
        ctx.emit(GenerationStarted(tuple(worker.node for worker in generation.workers)))
        for record in ctx.progress.start_generation(
            number, generation.world_size, restore.step if restore is not None else 0
        ):
            ctx.emit(record)
        self._inbox.start_generation()
        shares = ctx.speeds.start_generation(tuple(assignments))
        if store is None or store[0] not in assignments:
            worker = selection.members[0].index
            store = worker, await self._open_store(worker)
        spec = GenerationSpec(
            generation=number,
            world_size=generation.world_size,
            store_host=ctx.registry.info(store[0]).ip,
            store_port=store[1],
            restore=restore,
            shares=shares,
            remote=ctx.replicates,
            faults=ctx.injected_faults,
            survivors_stay=any(it.is_waiting for it in self._calls_of(assignments)),
            notes=notes,
            parts=ctx.registry.limits.parts,
        )
        self._note_calls(assignments)
        generation.assign(ctx.registry.is_alive)
        self._assignments = ctx.deps.workers.assign(spec, assignments)
        ctx.expect_replies(self._assignments)
        return generation

    def _calls_of(self, assignments: Mapping[int, RankAssignment]) -> list[FunctionCall]:
        calls = self._context.registry.calls
        return [calls[worker] for worker in assignments if worker in calls]

    def _note_calls(self, assignments: Mapping[int, RankAssignment]) -> None:
        """Notes which functions run now, and with which ranks new ones are called. Says so where
        rank 0 is another's for a while."""
        ctx, registry = self._context, self._context.registry
        calls, generation = registry.calls, ctx.generation.number
        new = {
            worker: FunctionCall(member.rank, len(assignments), generation)
            for worker, member in assignments.items()
        }
        stay = {
            worker: replace(calls[worker], state=CallState.RUNNING)
            for worker in assignments
            if worker in calls and calls[worker].is_waiting
        }
        registry.calls = calls | new | stay
        main = next(iter(assignments))
        if rank := registry.calls[main].rank:
            ctx.warn(
                f"rank 0 is the worker on node {registry.info(main).node}, which was entered as "
                f"rank {rank}, until there are more workers: what its function does on rank 0 only "
                "by what it knew at its start (files, lines of the log) waits for that"
            )

    async def _stop(self) -> None:
        """Lets the members leave; with checkpoints on, writes a last one. All of it takes at most
        `checkpoint.grace_period_s`."""
        ctx, generation = self._context, self._context.generation
        checkpointing = ctx.plan.writes_checkpoints
        until_s = ctx.now_s() + ctx.plan.spec.checkpoint.grace_period_s
        alive = [worker for worker in generation.assignments if ctx.registry.is_alive(worker)]
        ctx.broadcast(alive, WorkerCalls.end, generation.number)
        if not generation.fenced:
            if not checkpointing:
                await self._leave_softly()
            elif generation.all_restored:
                await self._finish_step()
        self._interrupt_members()
        if checkpointing:
            delay_s = min(LEAVE_DELAY_S, (until_s - ctx.now_s()) / 2)
            await ctx.wait_for(delay_s, lambda: not generation.active)
            newest = newest_complete_in_vaults(await self._vaults.inventory())
            if newest is not None and newest.step and not self._checkpoints.covers(newest.step):
                await self._checkpoints.write_final(newest, until_s - ctx.now_s())
        await ctx.wait_for(until_s - ctx.now_s(), lambda: not generation.active)
        ctx.post_event(machine.StopTimedOut() if generation.active else machine.TrainingStopped())

    async def _leave_softly(self) -> None:
        """Waits for half of the time until a member has left at the end of its step. Its peers
        would then wait for it without result."""
        ctx, generation = self._context, self._context.generation
        members = len(generation.active)
        self._interrupt_members(softly=True)
        await ctx.wait_for(
            ctx.plan.spec.checkpoint.grace_period_s / 2,
            lambda: len(generation.active) < members or not members,
        )

    async def _finish_step(self) -> None:
        """Waits for half of the time for the current step; no more once a rank is lost, because its
        peers would wait for it without result."""
        ctx, generation = self._context, self._context.generation
        ctx.broadcast(generation.active, WorkerCalls.drain, generation.number)
        await ctx.wait_for(
            ctx.plan.spec.checkpoint.grace_period_s / 2,
            lambda: not generation.active or bool(generation.pending_faults),
        )
