"""The members of one generation and their progress; the numbers of generations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property
from typing import Any

from rayzero.orchestrator.aio import Clock, ObservedState
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.facts import RESERVED_GENERATIONS, EventBus
from rayzero.orchestrator.job_events import NumbersReserved
from rayzero.orchestrator.policies.failure import Fault, FaultCause
from rayzero.orchestrator.policies.membership import Selected
from rayzero.workers.messages import (
    Crashed,
    Finished,
    InProcessStateInfo,
    Joined,
    Left,
    Notes,
    RankAssignment,
    RankMessage,
    Restored,
    WorkerInfo,
)
from rayzero.workers.step_rows import Heartbeats, combine_beats
from rayzero.workers.vault.records import Restore

FLUSH_SLICE_S = 1.0
"""Longest single wait for the journal's thread, which nothing can interrupt."""
NO_MEMBERS = Selected(())


class GenerationState(ObservedState):
    """The members of one generation and the state of each. Number 0 has no members.

    A member is *active* from its assignment until its function has returned or failed, it has left
    the generation, or its process ended: without active members a generation can do nothing more.
    """

    def __init__(
        self,
        number: int = 0,
        selection: Selected = NO_MEMBERS,
        assignments: Mapping[int, RankAssignment] | None = None,
        restore: Restore | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            assignments: by worker, in the order of the ranks.
        """
        super().__init__(on_change)
        self.number = number
        self.selection = selection
        self.assignments = assignments or {}
        self.restore = restore
        self.fenced = False
        """Whether the generation is being ended: its members leave, and a crash is no longer a
        fault."""
        self.ending_since_s: float | None = None
        """When the first member was notified to leave, or left early."""
        self.step = 0 if restore is None else restore.step
        """The step that its furthest rank works on, counted from 1."""
        self.pending_faults: list[Fault] = []
        """Faults that the failure policy has not decided yet."""
        self.return_value: dict[str, Any] = {}
        self.active: set[int] = set()
        self.joined: set[int] = set()
        self.restored: dict[int, float] = {}
        """When each member had loaded its state."""
        self.finished: set[int] = set()
        self._in_process: dict[int, InProcessStateInfo] = {}
        self._notes: dict[int, Notes] = {}  # by rank

    @property
    def world_size(self) -> int:
        return len(self.assignments)

    @cached_property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """The members, by rank."""
        members = {worker.index: worker for worker in self.selection.members}
        return tuple(map(members.__getitem__, self.assignments))

    @property
    def all_joined(self) -> bool:
        return len(self.joined) == self.world_size > 0

    @property
    def all_restored(self) -> bool:
        """Whether every member has an engine with its state loaded: a resize loses nothing."""
        return len(self.restored) == self.world_size > 0

    @property
    def all_finished(self) -> bool:
        return len(self.finished) == self.world_size > 0

    def fence(self, now_s: float) -> None:
        """Marks the generation as being ended."""
        self.fenced = True
        self._end(now_s)

    def in_process_states(self) -> dict[int, InProcessStateInfo]:
        """Returns the states in the memory of members that have left and whose processes are alive,
        by worker, in the order of the ranks."""
        states = self._in_process
        return {worker: states[worker] for worker in self.assignments if worker in states}

    def advance_to(self, step: int) -> None:
        """Records that some rank works on that step. Ranks proceed in lockstep, and a lost rank may
        not have reported its newest step, so the maximum counts."""
        if step > self.step:
            self.step = step

    def assign(self, is_alive: Callable[[int], bool]) -> None:
        """Marks the live members as active, before they get their assignments. A member that is
        lost by now would never leave."""
        self.active = set(filter(is_alive, self.assignments))

    def on_heartbeats(self, beats: Heartbeats) -> Heartbeats | None:
        """Records heartbeats. Returns those of active members, if there are any."""
        active, assignments = self.active, self.assignments
        own = [
            row
            for row, (worker, rank) in enumerate(zip(beats.workers, beats.ranks, strict=True))
            if worker in active and rank == assignments[worker].rank
        ]
        if not own:
            return None
        if len(own) < len(beats.workers):
            beats = combine_beats([beats.workers[row] for row in own], [*map(beats.row, own)])
        self.advance_to(max(beats.steps))
        return beats

    def on_joined(self, worker: int, message: Joined) -> bool:
        """Records a member that joined. Returns True if it was the last one."""
        if not self._concerns(worker, message):
            return False
        self.joined.add(worker)
        if self.all_joined:
            self._changed()
        return self.all_joined

    def on_restored(self, worker: int, message: Restored, at_s: float) -> bool:
        """Records a member that loaded its state. Returns True if it was the last one."""
        if not self._concerns(worker, message):
            return False
        self.restored[worker] = at_s
        self.advance_to(message.step + 1)
        if self.all_restored:
            self._changed()
        return self.all_restored

    def on_left(self, worker: int, message: Left, at_s: float) -> bool:
        """Records a member that left; a crash becomes a fault. Returns False if it was not
        active."""
        if not self._concerns(worker, message):
            return False
        self.active.discard(worker)
        self._changed()
        if isinstance(message, Finished):
            self.finished.add(worker)
            if message.rank == 0 and message.result:
                self.return_value = message.result
        if message.memory is not None:
            self._in_process[worker] = message.memory
        if message.notes is not None:
            self._notes[message.rank] = message.notes
        if isinstance(message, Finished):
            return True
        self._end(at_s)
        if isinstance(message, Crashed) and not self.fenced:
            cause = FaultCause(message.kind)
            where = {"traceback": message.traceback}
            self.add_fault(worker, cause, message.step, message.error, at_s, **where)
        return True

    def on_lost(
        self, worker: int, cause: FaultCause, detail: str, at_s: float, **where: str
    ) -> Fault | None:
        """Records a lost process. Returns the fault if it was a member that had not finished.

        Args:
            where: `traceback` and `place` of the fault.
        """
        self.active.discard(worker)
        self._changed()
        self._in_process.pop(worker, None)
        if worker not in self.assignments or worker in self.finished:
            return None
        return self.add_fault(worker, cause, self.step, detail, at_s, **where)

    def notes(self, step: int) -> bytes:
        """Returns the notes for the next function: those of the lowest rank that has left after
        `step`; empty if there is none."""
        left = (self._notes[rank] for rank in sorted(self._notes))
        return next((notes.content for notes in left if notes.step == step), b"")

    def forget(self, worker: int) -> None:
        """Forgets the state in the memory of a member, because its process is ended."""
        self._in_process.pop(worker, None)

    def _end(self, at_s: float) -> None:
        if self.ending_since_s is None:
            self.ending_since_s = at_s

    def _concerns(self, worker: int, message: RankMessage) -> bool:
        """Returns whether a message is of an active member, and about this generation."""
        return message.generation == self.number and worker in self.active

    def add_fault(
        self, worker: int, cause: FaultCause, step: int, detail: str, at_s: float, **where: str
    ) -> Fault:
        """Adds a member's fault to the pending ones. `where`: its `traceback` and `place`."""
        rank = self.assignments[worker].rank
        trained_s = at_s - self._restored_s if self.all_restored else 0.0
        member = self.workers[rank]
        fault = Fault(
            cause, member, rank, step, detail, at_s, self.number, trained_s=trained_s, **where
        )
        self.pending_faults.append(fault)
        self._changed()
        return fault

    @cached_property
    def _restored_s(self) -> float:
        """When the last member had loaded its state."""
        return max(self.restored.values())


class GenerationNumbers:
    """Counts the generations of a run. Each process of the run reserves numbers after those that
    earlier processes may have given (`JobFacts.reserved_generations`). It gives no number before
    its reservation is durable, because a lost process may lose its last journal entries.

    Args:
        flush_journal: waits up to so many seconds until all events so far are durable; returns
            whether they are.
        limit_s: how long the first generation waits for the journal.
    """

    def __init__(
        self,
        events: EventBus,
        flush_journal: Callable[[float], Awaitable[bool]],
        clock: Clock,
        limit_s: float,
    ) -> None:
        self._events = events
        self._flush_journal = flush_journal
        self._clock = clock
        self._limit_s = limit_s
        self._given = events.facts.reserved_generations - RESERVED_GENERATIONS
        self._is_durable = False

    async def await_reserved(self) -> None:
        """Waits for the journal, before the first number is given.

        Raises:
            JobFailedError: the journal could not be written for `limit_s`.
        """
        until_s = self._clock.now() + self._limit_s
        while not self._is_durable:
            self._is_durable = await self._flush_journal(FLUSH_SLICE_S)
            if not self._is_durable and self._clock.now() > until_s:
                raise JobFailedError(
                    f"the job's journal cannot be written for {self._limit_s:g} s, and the first "
                    "generation of workers begins only once its number is in the journal",
                    allowed="a shorter outage",
                    fix="checkpoint.path, the disk or store it is on, or a longer "
                    "recovery.patience_s: the job waits for half of it",
                )

    def next(self) -> int:
        """Returns the number of a new generation. The next numbers are reserved when half are left:
        so no repair waits for the journal, and an outage of its store may last for all of these."""
        self._given += 1
        reserved = self._events.facts.reserved_generations
        if reserved - self._given < RESERVED_GENERATIONS // 2:
            self._events.emit(NumbersReserved(reserved + RESERVED_GENERATIONS))
        return self._given
