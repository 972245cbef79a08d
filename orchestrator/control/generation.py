"""The members of one generation and their progress, and the timing of recoveries. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rayzero.orchestrator.job_events import Repaired, Resized
from rayzero.orchestrator.observed import ObservedState
from rayzero.orchestrator.policies.failure import Fault, FaultCause
from rayzero.orchestrator.policies.membership import Selected
from rayzero.workers.messages import (
    Crashed,
    Finished,
    Heartbeat,
    InProcessStateInfo,
    Joined,
    Notes,
    RankAssignment,
    RankMessage,
    Restored,
    Stopped,
    WorkerInfo,
)
from rayzero.workers.vault.records import Restore

_BEFORE_STEP = ("load", "recompute")
"""The phases of a recovery that the next finished step ends."""
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
        """Whether it is being ended: its members leave, and a crash is no longer a fault."""
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

    @cached_property
    def multi_node(self) -> bool:
        return len({worker.node_id for worker in self.workers}) > 1

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
        """It is being ended."""
        self.fenced = True
        self._end(now_s)

    def in_process_states(self) -> dict[int, InProcessStateInfo]:
        """The states in the memory of members that have left and whose processes are alive, by
        worker, in the order of the ranks."""
        states = self._in_process
        return {worker: states[worker] for worker in self.assignments if worker in states}

    def advance_to(self, step: int) -> None:
        """Some rank works on that step. Ranks proceed in lockstep, and a lost one may not have
        reported its newest: the maximum counts."""
        if step > self.step:
            self.step = step

    def assign(self, is_alive: Callable[[int], bool]) -> None:
        """The members are about to get their assignments; one that is lost by now never leaves."""
        self.active = set(filter(is_alive, self.assignments))

    def on_heartbeat(self, worker: int, beat: Heartbeat) -> bool:
        """Records a heartbeat. False if its sender is no active member."""
        if worker not in self.active or beat.rank != self.assignments[worker].rank:
            return False
        self.advance_to(beat.step)
        return True

    def on_joined(self, worker: int, message: Joined) -> bool:
        """Records a member that joined. True if it was the last one."""
        if not self._concerns(worker, message):
            return False
        self.joined.add(worker)
        self._changed()
        return self.all_joined

    def on_restored(self, worker: int, message: Restored, at_s: float) -> bool:
        """Records a member that loaded its state. True if it was the last one."""
        if not self._concerns(worker, message):
            return False
        self.restored[worker] = at_s
        self.advance_to(message.step + 1)
        self._changed()
        return self.all_restored

    def on_left(self, worker: int, message: Finished | Stopped | Crashed, at_s: float) -> bool:
        """Records a member that left; a crash becomes a fault. False if it was not active."""
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
            self._add_fault(worker, cause, message.step, message.error, at_s, message.traceback)
        return True

    def on_lost(
        self,
        worker: int,
        cause: FaultCause,
        detail: str,
        at_s: float,
        traceback: str = "",
        place: str = "",
    ) -> Fault | None:
        """Records a lost process. Returns the fault if it was a member that had not finished."""
        self.active.discard(worker)
        self._changed()
        self._in_process.pop(worker, None)
        if worker not in self.assignments or worker in self.finished:
            return None
        return self._add_fault(worker, cause, self.step, detail, at_s, traceback, place)

    def notes(self, step: int) -> bytes:
        """The notes for the next function from that of the lowest rank that has left after `step`;
        empty without one."""
        left = (self._notes[rank] for rank in sorted(self._notes))
        return next((notes.content for notes in left if notes.step == step), b"")

    def forget(self, worker: int) -> None:
        """A member's process, which has left, is ended: the state in its memory is gone."""
        self._in_process.pop(worker, None)

    def on_early_return(self, worker: int, reason: str, at_s: float) -> None:
        """A member's function has returned although other members wait for it."""
        self._add_fault(worker, FaultCause.EARLY_RETURN, self.step, reason, at_s)

    def _end(self, at_s: float) -> None:
        if self.ending_since_s is None:
            self.ending_since_s = at_s

    def _concerns(self, worker: int, message: RankMessage) -> bool:
        """Whether it is a message of an active member, about this generation."""
        return message.generation == self.number and worker in self.active

    def _add_fault(
        self,
        worker: int,
        cause: FaultCause,
        step: int,
        detail: str,
        at_s: float,
        traceback: str = "",
        place: str = "",
    ) -> Fault:
        rank = self.assignments[worker].rank
        trained_s = at_s - max(self.restored.values()) if self.all_restored else 0.0
        fault = Fault(
            cause,
            self.workers[rank],
            rank,
            step,
            detail,
            at_s,
            self.number,
            traceback,
            trained_s,
            place,
        )
        self.pending_faults = [*self.pending_faults, fault]
        return fault


@dataclass
class _Timeline:
    """The current recovery, or resize if there is no cause. A fault during a resize turns it into a
    recovery."""

    world_size: int
    phase: str
    phase_began_s: float
    reason: str = ""
    cause: str = ""
    lost: tuple[str, ...] = ()
    step: int = 0
    steps_redone: int = 0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class RecoveryTimer:
    """Times the phases from a fault or a resize to the next finished step; one at a time.

    The phases: detect, fence or drain, select_step, select_members, rendezvous, load, recompute.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._current: _Timeline | None = None
        self._next: _Timeline | None = None
        """A resize that was requested before the step that completes a repair."""

    def fault_detected(
        self, cause: str, lost: Iterable[str], world_size: int, since_s: float
    ) -> None:
        """The policy decided to recover from a fault whose first sign came at `since_s`."""
        self._next = None
        if self._current is None:
            self._current = _Timeline(world_size, "detect", since_s)
        self._current.cause = self._current.cause or cause
        self._current.lost += tuple(lost)
        self.enter_phase("detect")

    def resize_requested(self, reason: str, world_size: int) -> None:
        resize = _Timeline(world_size, "drain", self._now_s(), reason)
        if self._current is None:
            self._current = resize
        elif self._current.phase in _BEFORE_STEP:
            self._next = resize

    def enter_phase(self, phase: str) -> None:
        if self._next is not None:
            if phase == "drain":
                return
            if phase not in _BEFORE_STEP:  # no step came before the drain: both are one repair
                self._next = None
        if (timeline := self._current) is not None:
            now_s = self._now_s()
            timeline.seconds[timeline.phase] += now_s - timeline.phase_began_s
            timeline.phase_began_s, timeline.phase = now_s, phase

    def step_selected(self, step: int, steps_redone: int) -> None:
        """The step to resume from. `steps_redone` counts only steps not counted before."""
        if self._current is not None:
            self._current.step = step
            self._current.steps_redone += steps_redone

    def completed(self, step_s: float, world_size: int) -> Repaired | Resized | None:
        """A step was finished that took `step_s`. Returns the recovery it completes, if any."""
        timeline = self._current
        if timeline is None or timeline.phase not in _BEFORE_STEP:
            return None  # a step of the previous generation
        self._current, self._next = self._next, None
        seconds = timeline.seconds
        seconds[timeline.phase] += max(0.0, self._now_s() - timeline.phase_began_s - step_s)
        before, step = timeline.world_size, timeline.step
        if not timeline.cause:
            return Resized(timeline.reason, step, before, world_size, dict(seconds))
        redone = timeline.steps_redone
        return Repaired(
            timeline.cause, timeline.lost, step, redone, before, world_size, dict(seconds)
        )
