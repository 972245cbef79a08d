"""Reconfiguration: the one coroutine that leads from a fault or a resize to the next generation.

`Reconfiguration._reconfigure` reads in the order things happen: fence or drain the generation,
select the step to resume from, select the members, rendezvous. Loading the state and recomputing
steps is the members' work; `GenerationState` follows it. A further fault cancels the coroutine and
begins it again: a cancelled attempt emits nothing more, and the next one begins when it has ended.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayzero.engine.data.consumed import SAMPLES_PHASE
from rayzero.orchestrator import machine
from rayzero.orchestrator.control.calls import Calls, WorkerUnavailableError
from rayzero.orchestrator.control.chaos import ClusterFaultInjector
from rayzero.orchestrator.control.failures import FailureHandler
from rayzero.orchestrator.control.generation import GenerationNumbers, GenerationState
from rayzero.orchestrator.control.inbox import WorkerInbox
from rayzero.orchestrator.control.loop import JobLoop, JobMachine
from rayzero.orchestrator.control.members import Members
from rayzero.orchestrator.control.reattachment import Reattachment
from rayzero.orchestrator.control.recovery_timer import RecoveryTimer
from rayzero.orchestrator.control.restore import RestoreSelector
from rayzero.orchestrator.control.rollouts import RolloutBuffer
from rayzero.orchestrator.control.steps import StepReports
from rayzero.orchestrator.control.vaults import VaultManager
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.job_events import GenerationStarted
from rayzero.orchestrator.policies.membership import Selected, not_enough_error
from rayzero.orchestrator.policies.placement import (
    HAS_LEFT_ITS_LOOP,
    IS_MISPLACED,
    CallState,
    FunctionCall,
    misplaced,
)
from rayzero.workers.calls import WorkerCalls
from rayzero.workers.messages import GenerationSpec, RankAssignment
from rayzero.workers.vault.records import Restore

if TYPE_CHECKING:  # it imports Ray, without which the controller is tested
    from rayzero.orchestrator.cluster.worker_group import WorkerGroup

SAMPLES_WAIT_S = 5.0
"""How long a step that is to be the last one waits for samples: longer than several heartbeats,
because a rank that got samples says so with its next heartbeat."""
_LOOK_S = 0.5


@dataclass(eq=False)
class Reconfiguration:
    """Owns the current attempt to form a generation."""

    _loop: JobLoop
    _machine: JobMachine
    _members: Members
    _calls: Calls
    _timer: RecoveryTimer
    _failures: FailureHandler
    _restore: RestoreSelector
    _vaults: VaultManager
    _selection: MemberSelection
    _rollouts: RolloutBuffer
    _rendezvous: Rendezvous
    reattachment: Reattachment
    """Takes over the first generation of a controller whose job trains already."""
    _attempt: asyncio.Task[None] | None = None

    def form_first(self) -> None:
        self._begin(None)

    def recover(self) -> None:
        """Fences the generation, and forms the next one from what is left."""
        # Before anything else: leaving is what the next generation waits for longest.
        self._rendezvous.interrupt()
        self._begin(self._fence)

    def on_resize_requested(self, reason: str) -> None:
        """Starts the time of a resize, which ends with the first step after it."""
        self._timer.resize_requested(reason, self._members.generation.world_size)

    def resize(self) -> None:
        """Drains the generation, and forms the next one with other members."""
        self._begin(self._drain)

    def cancel(self) -> None:
        """Ends the current attempt, if there is one."""
        if self._attempt is not None:
            self._attempt.cancel()

    def _begin(self, unwind: Callable[[], Awaitable[None]] | None) -> None:
        self.cancel()
        self._attempt = self._loop.spawn(self._reconfigure(unwind, self._attempt))

    async def _reconfigure(
        self, unwind: Callable[[], Awaitable[None]] | None, cancelled: asyncio.Task[None] | None
    ) -> None:
        """Ends a generation with `unwind`, if given, and forms the next, up to GenerationFormed."""
        if cancelled is not None:
            await asyncio.wait([cancelled])
        if unwind is not None:
            await unwind()
        if self._members.generation.all_finished:
            return  # the job ended while it was drained: AllFinished is in the queue
        generation = self._rendezvous.form(*await self._select())
        await self._loop.wait_until(lambda: generation.all_joined)
        if not generation.fenced:  # else FaultRecoverable is in the queue: another attempt begins
            self._machine.post(machine.GenerationFormed(generation.number))

    async def _select(self) -> tuple[Selected, Restore | None, tuple[int, int]]:
        """Returns the members, the state that they start from, and the rendezvous store. Selects
        again if a vault was lost meanwhile, because the state or the rollout buffer may be lost
        with it."""
        while True:
            removed = self._vaults.removed
            self._timer.enter_phase("select_step")
            restore, early = await asyncio.gather(
                self._restore.select(), self._rendezvous.prepare()
            )
            self._timer.enter_phase("select_members")
            selection = await self._selection.select(stays=restore is not None)
            while await self._rollouts.had_to_open(selection.members):
                selection = await self._selection.select(stays=restore is not None)
            self._timer.enter_phase("rendezvous")
            store = await self._rendezvous.open_store(selection, early)
            if self._vaults.removed == removed:
                return selection, restore, store

    async def _fence(self) -> None:
        """Returns once the generation can do nothing more, whatever state it was in. Without a
        limit: a survivor may be in a long call, and the hang detector kills those that stay."""
        generation = self._members.generation
        self._timer.enter_phase("fence")
        await self._loop.wait_until(lambda: not generation.active)
        self._failures.on_fenced(generation)
        await self._failures.kills.wait()

    async def _drain(self) -> None:
        """Returns once all members left at the end of a step. Without a limit: a step may take any
        time, and the hang detector finds a hang. A step that waits for samples is given up."""
        generation = self._members.generation
        self._timer.enter_phase("drain")
        await self._rendezvous.drain(math.inf, lambda: not generation.active)
        if generation.active:
            self._rendezvous.interrupt()
            await self._fence()


@dataclass(eq=False)
class MemberSelection:
    """Waits for workers if too few are left, and ends the processes that cannot continue.

    Args:
        _start_timeout_s: `workers.start_timeout_s`.
    """

    _loop: JobLoop
    _members: Members
    _events: EventBus
    _failures: FailureHandler
    _start_timeout_s: float

    async def select(self, *, stays: bool) -> Selected:
        """Returns survivors, ready spares and newcomers. Ends processes whose functions do not
        continue, and waits for the processes that replace them; for other workers only if there are
        too few. A function that was called ahead continues only if others wait for it in their
        loops.

        Raises:
            JobFailedError: there are too few workers after `workers.start_timeout_s`.
        """
        registry = self._members.registry
        why_spent = HAS_LEFT_ITS_LOOP if stays else "there is no finished step to continue from"
        while True:
            self._failures.retire(registry.spent(stays=stays), why_spent)
            selection = await self._await_members(self._wanted())
            calls, useless = registry.calls_of(selection.indices), set[int]()
            if any(call.is_bound for call in calls):
                useless.update(misplaced(self._members.assign(selection), registry.calls))
            ahead = {w.index for w in registry.ready if registry.is_ahead(w.index)}
            stay = any(call.is_waiting for call in calls)
            useless |= ahead.difference(selection.indices if stay else ())
            if not useless:
                return selection
            self._failures.retire(sorted(useless), IS_MISPLACED)

    def _wanted(self) -> int:
        """Returns the number of workers to wait for beyond the least number, or 0.

        If functions continue only with their old world size, that is the number. If no function
        continues, it counts all workers that start in reservations which the job holds: a worker
        that came later would make all begin again.
        """
        registry = self._members.registry
        calls = registry.calls_of(worker.index for worker in registry.ready)
        bound = [call.world_size for call in calls if call.is_waiting and call.keeps_rank]
        if bound:
            return max(bound)
        if calls or not registry.calls:
            return 0
        nodes = self._members.vault_addresses
        held = [w for w in registry.awaiting_replacement if w.node_id in nodes]
        return min(registry.limits.max, max(registry.awaited, len(registry.ready) + len(held)))

    async def _await_members(self, wanted: int) -> Selected:
        """Waits up to `workers.start_timeout_s` for the least number of workers. Then waits for the
        wanted number, for twice as long as the first workers took to start.

        Raises:
            JobFailedError: there are fewer than the least number.
        """
        registry = self._members.registry
        limit_s, registry.awaited = self._start_timeout_s, max(1, wanted)
        if registry.select_members() is None:
            self._events.warn(
                f"{len(registry.ready)} of at least "
                f"{registry.present_limits.least_above(len(registry.ready))} workers are left: "
                f"waiting up to {limit_s:g} s for replacements (workers.start_timeout_s)"
            )
            while not await self._loop.wait_for(
                limit_s, lambda: registry.select_members() is not None
            ):
                if registry.head_answers:  # without it no worker can start
                    raise not_enough_error(len(registry.ready), registry.present_limits, limit_s)
        if len(registry.ready) < wanted:
            limit_s = 2 * self._events.facts.start_s
            await self._loop.wait_for(limit_s, lambda: len(registry.ready) >= wanted)
        selection = registry.select_members()
        if selection is None:  # one was lost meanwhile
            return await self._await_members(wanted)
        registry.awaited = 0
        return selection


@dataclass(eq=False)
class Rendezvous:
    """Forms generations, and interrupts them. The only writer of `Members.generation`.

    Placements, addresses and slots are computed here, from what the controller knows already: the
    members wait for one reply each.
    """

    _loop: JobLoop
    _members: Members
    _calls: Calls
    _workers: WorkerGroup
    _events: EventBus
    _numbers: GenerationNumbers
    _steps: StepReports
    _injector: ClusterFaultInjector
    _inbox: WorkerInbox
    _vaults: VaultManager
    _rollouts: RolloutBuffer

    async def prepare(self) -> tuple[int, int] | None:
        """Opens a rendezvous store while the vaults are asked, on the worker that gets rank 0 if
        nothing changes. Returns that worker and the port.

        Raises:
            JobFailedError: the journal could not be written (`GenerationNumbers`).
        """
        store, _ = await asyncio.gather(self._open_early(), self._numbers.await_reserved())
        return store

    async def _open_early(self) -> tuple[int, int] | None:
        selection = self._members.registry.select_members()
        if selection is None:
            return None
        worker = selection.members[0].index
        try:
            return worker, await self._open(worker)
        except WorkerUnavailableError as lost:  # if it was no member, this attempt continues
            self._loop.on_error(lost)
            return None

    async def _open(self, worker: int) -> int:
        return await self._calls.worker(worker, WorkerCalls.open_store)

    async def open_store(
        self, selection: Selected, early: tuple[int, int] | None
    ) -> tuple[int, int]:
        """Returns the store that `prepare` has opened, if it is on a member. Otherwise opens a new
        one."""
        if early is not None and early[0] in selection.indices:
            return early
        worker = selection.members[0].index
        return worker, await self._open(worker)

    def form(
        self, selection: Selected, restore: Restore | None, store: tuple[int, int]
    ) -> GenerationState:
        """Begins the generation, and sends every member its assignment. Waits for nothing, because
        selected workers may be lost during a wait."""
        members, registry = self._members, self._members.registry
        number = self._numbers.next()
        assignments = members.assign(selection)
        notes = members.generation.notes(restore.step) if restore is not None else b""
        known = members.vault_addresses
        self._vaults.used_addresses = {
            member.node_id: known.get(member.node_id, "") for member in selection.members
        }
        generation = members.generation = GenerationState(
            number, selection, assignments, restore, self._loop.changed.notify
        )
        registry.members = selection.indices
        self._events.emit(GenerationStarted(tuple(worker.node for worker in generation.workers)))
        shares = self._steps.start_generation(generation)
        self._inbox.start_generation()
        spec = GenerationSpec(
            generation=number,
            world_size=generation.world_size,
            store_host=registry.info(store[0]).ip,
            store_port=store[1],
            restore=restore,
            members=generation.workers,
            shares=shares,
            faults=self._injector.injected,
            survivors_stay=any(call.is_waiting for call in registry.calls_of(assignments)),
            notes=notes,
            parts=registry.limits.parts,
            rollout_group=self._rollouts.group,
            rollouts=self._rollouts.address,
        )
        self._note_calls(assignments)
        generation.assign(registry.is_alive)
        self._calls.expect(self._workers.assign(spec, assignments))
        return generation

    def _note_calls(self, assignments: Mapping[int, RankAssignment]) -> None:
        """Notes which functions run now, and the ranks with which new functions are called. Warns
        if the function of rank 0 was called with another rank."""
        registry = self._members.registry
        calls, generation = registry.calls, self._members.generation.number
        new = {
            worker: FunctionCall(member.rank, len(assignments), generation)
            for worker, member in assignments.items()
        }
        stay = {
            worker: calls[worker].come_to(CallState.RUNNING)
            for worker in assignments
            if worker in calls and calls[worker].is_waiting
        }
        registry.calls = calls | new | stay
        main = next(iter(assignments))
        if rank := registry.calls[main].rank:
            self._events.warn(
                f"rank 0 is the worker on node {registry.info(main).node}, which was entered as "
                f"rank {rank}, until there are more workers: if the function has stored its rank, "
                "work for rank 0 (files, lines of the log) is not done until then"
            )

    async def drain(self, limit_s: float, is_over: Callable[[], bool]) -> None:
        """Tells the active members to leave at the end of their step. Returns when `is_over` holds,
        after the limit, or when a member waits for samples of rollouts: its step may never end if
        no worker makes them."""
        generation = self._members.generation
        self._calls.broadcast(generation.active, WorkerCalls.drain, generation.number)
        now_s = self._loop.now_s()
        until_s = now_s + limit_s
        waits_since_s = math.inf
        while not await self._loop.wait_for(min(_LOOK_S, until_s - now_s), is_over):
            now_s = self._loop.now_s()
            active = generation.active if self._rollouts.group else ()
            beats = (self._inbox.last_heartbeat(worker)[0] for worker in active)
            is_starving = any(beat is not None and beat.phase == SAMPLES_PHASE for beat in beats)
            waits_since_s = min(waits_since_s, now_s) if is_starving else math.inf
            if now_s >= min(until_s, waits_since_s + SAMPLES_WAIT_S):
                return

    def interrupt(self, *, softly: bool = False) -> None:
        """Tells the active members to leave. A member that was just assigned executes the
        assignment first.

        Args:
            softly: let them finish the collective they are in.
        """
        generation = self._members.generation
        generation.fence(self._loop.now_s())
        method = WorkerCalls.stop if softly else WorkerCalls.fence
        self._calls.broadcast(generation.active, method, generation.number)
