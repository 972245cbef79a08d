"""The way from one generation to the next: fence or drain, pick, settle, form."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator import events as ev
from rayzero.orchestrator.aio import PendingReplies, yield_if_large
from rayzero.orchestrator.control.context import JobContext, WorkerUnavailableError
from rayzero.orchestrator.control.failures import FailureHandler
from rayzero.orchestrator.control.generation import GenerationState, RecoveryTimer
from rayzero.orchestrator.control.vaults import VaultManager
from rayzero.orchestrator.job_events import JobWarning, Rewound
from rayzero.orchestrator.policies import membership, placement, recovery
from rayzero.orchestrator.policies.membership import NotEnough, Selected
from rayzero.workers.messages import GenerationSpec, RankAssignment, WorkerInfo
from rayzero.workers.vault.records import Restore, SlotRef

FENCE_TIMEOUT_S = 10.0
"""How long the survivors of a fault may take to unwind before they are killed."""


NewestCheckpoint = Callable[[frozenset[int]], Awaitable[recovery.CheckpointRef | None]]
"""The newest whole checkpoint but for some steps: at hand, or looked up."""

LeaveCommand = Callable[[Iterable[int], int], PendingReplies]
"""Has workers leave a generation."""


@dataclass
class _Attempt:
    """What one way has found out so far."""

    task: asyncio.Task[None] | None = None
    restore: Restore | None = None
    step: int = 0
    selection: Selected = field(default_factory=lambda: Selected(()))
    store: tuple[int, int] | None = None
    """(worker, port) of a store that was opened ahead."""


class Reconfiguration:
    """Owns the way under way; setting out again ends it.

    The survivors of a death wait for nothing but each other and one answer each: the places,
    the addresses and the slots are worked out here, from what is known already.
    """

    def __init__(
        self,
        ctx: JobContext,
        failures: FailureHandler,
        vaults: VaultManager,
        timer: RecoveryTimer,
        newest: NewestCheckpoint,
    ) -> None:
        self.not_chosen = Selected(())
        """Of the newest generation: who was left out, to be let go once it is formed."""
        self.before_form: Callable[[Sequence[WorkerInfo]], tuple[float, ...]] = lambda _: ()
        """Told the members, by rank, when a generation is about to begin; gives their shares."""
        self._context = ctx
        self._failures = failures
        self._vaults = vaults
        self._recovery_timer = timer
        self._newest_checkpoint = newest
        self._attempt = _Attempt()
        self._assignments = PendingReplies()
        """Of the newest generation's members their places."""

    def fence(self, passage: int) -> None:
        generation = self._context.generation
        generation.fenced = True
        self.interrupt_members(
            generation.active
        )  # before anything else: it is what survivors wait for
        self._start("fence", self._fence(passage))

    def drain(self, passage: int) -> None:
        self._start("drain", self._drain(passage))

    def select_step(self, passage: int) -> None:
        if self._attempt.task is None:  # the first generation of all: nobody had to be unwound
            self._attempt = _Attempt()
        self._next_phase("select_step", self._select_step(passage))

    def select_members(self, passage: int) -> None:
        self._next_phase("select_members", self._select_members(passage))

    def rendezvous(self, generation: int, passage: int) -> None:
        self._next_phase("rendezvous", self._rendezvous(generation, passage))

    def cancel(self) -> None:
        """Gives the way up: the job is being stopped."""
        if self._attempt.task is not None:
            self._attempt.task.cancel()

    def interrupt_members(self, workers: frozenset[int], *, softly: bool = False) -> None:
        """Has members leave, but none before it has heard its place: it would begin after it.

        Args:
            softly: let them finish the collective they are in.
        """
        group, telling = self._context.deps.workers, self._assignments
        generation = self._context.generation.number
        leave = group.stop if softly else group.fence
        if placed := workers - telling.pending:
            self._context.tasks.spawn(self._context.await_replies(leave(placed, generation)))
        if placed < workers:
            late = self._interrupt_when_assigned(workers - placed, telling, leave, generation)
            self._context.tasks.spawn(late)

    async def _interrupt_when_assigned(
        self, workers: frozenset[int], telling: PendingReplies, leave: LeaveCommand, number: int
    ) -> None:
        """As each of them hears its place."""
        while workers:
            await telling.wait_any(workers)
            placed = workers - telling.pending
            self._context.tasks.spawn(self._context.await_replies(leave(placed, number)))
            workers -= placed

    def _start(self, part: str, work: Coroutine[Any, Any, None]) -> None:
        self.cancel()
        self._attempt = _Attempt()
        self._next_phase(part, work)

    def _next_phase(self, part: str, work: Coroutine[Any, Any, None]) -> None:
        self._recovery_timer.enter_phase(part, self._context.now_s())
        self._attempt.task = self._context.tasks.spawn(work)

    async def _fence(self, passage: int) -> None:
        ctx, generation = self._context, self._context.generation
        if not await ctx.wait_for(FENCE_TIMEOUT_S, lambda: generation.all_left):
            for worker in generation.active:
                self._failures.expel(worker, f"it did not unwind within {FENCE_TIMEOUT_S:g} s")
        await self._failures.wait_killed()
        ctx.post_event(ev.Fenced(passage))

    async def _drain(self, passage: int) -> None:
        """Has no limit of its own: a step takes what it takes, and a hang is found elsewhere."""
        ctx, generation = self._context, self._context.generation
        drained = ctx.deps.workers.drain(generation.active, generation.number)
        ctx.tasks.spawn(ctx.await_replies(drained))
        await ctx.changed.wait_until(lambda: generation.all_left)
        if not generation.all_finished:  # then the job is done, and that is told elsewhere
            ctx.post_event(ev.Fenced(passage))

    async def _select_step(self, passage: int) -> None:
        ctx, way = self._context, self._attempt
        held, _ = await asyncio.gather(self._vaults.inventory(), self._open_store_early(way))
        stored = await self._newest_checkpoint(self._failures.excluded.checkpoints)
        damaged = self._failures.excluded
        picked = recovery.select_recovery_step(held, self._in_process_states(), stored, damaged)
        if isinstance(picked, recovery.FromWorkers):
            slots = await self._salvage(picked)
            if not slots:
                picked = recovery.select_recovery_step(
                    held, recovery.InProcessStates(), stored, damaged
                )
        match picked:
            case recovery.FromVaults(step, slots):
                way.restore = Restore(step, slots)
            case recovery.FromWorkers(step, _):
                way.restore = Restore(step, slots)
            case recovery.FromCheckpoint(step, folder):
                way.restore = Restore(step, checkpoint=folder)
        redone = ctx.progress.rewind(picked.step)
        ctx.emit(Rewound(picked.step, redone))
        if isinstance(picked, recovery.FromCheckpoint | recovery.FreshStart):
            self._warn_lost_steps(picked, redone)
        way.step = picked.step
        self._recovery_timer.step_selected(picked.step, redone)
        ctx.post_event(ev.RecoveryStepSelected(passage, picked.step))

    async def _select_members(self, passage: int) -> None:
        ctx = self._context
        limit_s = ctx.plan.resources.timeout_s
        choice = ctx.registry.select_members()
        if isinstance(choice, NotEnough):
            least = ctx.registry.limits.min
            text = f"{choice.available} of at least {least} workers are left: waiting for more"
            ctx.emit(JobWarning(f"{text}, at most {limit_s:g} s (workers.start_timeout_s)"))
            await ctx.wait_for(limit_s, lambda: isinstance(ctx.registry.select_members(), Selected))
            choice = ctx.registry.select_members()
        if isinstance(choice, NotEnough):
            raise membership.not_enough_error(choice, ctx.registry.limits, limit_s)
        self._attempt.selection = choice
        chosen = tuple(worker.index for worker in choice.members)
        ctx.post_event(ev.MembersSelected(passage, chosen))

    async def _rendezvous(self, number: int, passage: int) -> None:
        """Gives every member its place. The store is opened by any live worker."""
        ctx, way = self._context, self._attempt
        members = way.selection.members
        places = placement.assign_ranks(members)
        await yield_if_large(len(members))
        generation = ctx.generation = GenerationState(number, passage, places, members, way.restore)
        ctx.registry.members = generation.members
        for record in ctx.progress.start_generation(number, len(places), way.step):
            ctx.emit(record)
        self.not_chosen = way.selection
        if missing := [one.index for one in members if not ctx.registry.is_alive(one.index)]:
            for worker in missing:
                self._failures.on_member_missing(worker)
            return
        shares = self.before_form(generation.workers)
        if way.store is None or way.store[0] not in generation.members:
            way.store = await self._open_store_on(places[0].worker)
        host, port = ctx.registry.info(way.store[0]), way.store[1]
        self._vaults.generation_uses(worker.node_id for worker in members)
        formation = GenerationSpec(
            generation=number,
            world_size=len(places),
            store_host=host.ip,
            store_port=port,
            restore=way.restore,
            shares=shares,
            remote=ctx.replicates,
            faults=ctx.injected_faults,
        )
        generation.mark_assigned()
        self._assignments = ctx.deps.workers.assign(formation, self._member_assignments(generation))
        ctx.tasks.spawn(ctx.await_replies(self._assignments))

    def _member_assignments(self, generation: GenerationState) -> dict[int, RankAssignment]:
        """What each member's place has of its own, by worker."""
        vaults = self._context.vault_addresses
        return {
            place.worker: RankAssignment(
                place.rank, place.local_rank, place.local_world_size, vaults.get(one.node_id, "")
            )
            for place, one in zip(generation.placements, generation.workers, strict=True)
        }

    async def _open_store_early(self, way: _Attempt) -> None:
        """Ahead of time, where the membership to come has its first rank as things stand."""
        choice = self._context.registry.select_members()
        if isinstance(choice, NotEnough):
            return
        try:
            way.store = await self._open_store_on(placement.rank_zero(choice.members).index)
        except WorkerUnavailableError as gone:  # if it was no member, the way goes on without it
            self._failures.on_worker_lost(gone.worker, gone.cause)

    async def _open_store_on(self, worker: int) -> tuple[int, int]:
        return worker, await self._context.call_worker(
            worker, self._context.deps.workers.open_store(worker)
        )

    async def _salvage(self, picked: recovery.FromWorkers) -> tuple[SlotRef, ...]:
        """Copies memories into vaults. None, if that fails, or if they turn out not to be one
        state: a generation that was fenced before it had a state still holds parts cut for an
        older one."""
        ctx = self._context
        nodes = [ctx.registry.info(worker).node_id for worker in picked.workers]
        asked = [
            ctx.call_worker(
                worker, ctx.deps.workers.salvage(worker, ctx.vault_addresses.get(node, ""))
            )
            for worker, node in zip(picked.workers, nodes, strict=True)
        ]
        try:
            made = await asyncio.gather(*asked)
        except RayzeroError as error:
            ctx.emit(JobWarning(f"a worker's memory could not be copied: {error.seen}"))
            return ()
        held = [recovery.StoredSlot(slot, node) for slot, node in zip(made, nodes, strict=True)]
        if len(held) == 1:
            return recovery.slot_refs(held)
        newest = recovery.newest_complete_in_vaults(held)
        return newest.slots if newest is not None and newest.step == picked.step else ()

    def _in_process_states(self) -> recovery.InProcessStates:
        """What can still be copied into a vault."""
        ctx = self._context
        there = ctx.generation.in_process_states()
        by_rank = {
            rank: (worker, memory)
            for rank, (worker, memory) in (there.by_rank or {}).items()
            if ctx.registry.is_alive(worker)
            and ctx.registry.info(worker).node_id in ctx.vault_addresses
        }
        return recovery.InProcessStates(there.world_size, by_rank)

    def _warn_lost_steps(self, picked: recovery.RecoveryPoint, redone: int) -> None:
        if self._context.generation.number == 0 or redone == 0:
            return  # the beginning of a run is told as such
        if isinstance(picked, recovery.FromCheckpoint):
            where = f"the checkpoint of step {picked.step} ({picked.folder})"
        else:
            where = "the beginning: there is no whole checkpoint"
        self._context.emit(
            JobWarning(
                f"no complete copy of the state is left in memory: going back to {where}; "
                f"{redone} finished step{'s' * (redone != 1)} will be done again"
            )
        )
