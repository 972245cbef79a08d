"""GenerationState; recovery timing.

Who is how far in one generation: from the workers' messages to the machine's events. Pure.

Times the ways between two generations, and keeps a record of each. Pure but for `append`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rayzero.orchestrator.job_events import Repaired, Resized
from rayzero.orchestrator.policies.failure import Fault, FaultCause
from rayzero.orchestrator.policies.membership import Selected
from rayzero.orchestrator.policies.placement import RankPlacement
from rayzero.orchestrator.policies.recovery import InProcessStates
from rayzero.workers.messages import (
    Crashed,
    Finished,
    Heartbeat,
    InProcessStateInfo,
    Joined,
    Restored,
    Stopped,
    WorkerInfo,
)
from rayzero.workers.vault.records import Restore

NO_MEMBERS = Selected(())


class GenerationState:
    """The members of one generation and what became of each. Number 0 has no members.

    A member is *in* from the moment it is told its place until its function is unwound, whatever
    the way: a generation of which nobody is in can do nothing more.
    """

    def __init__(
        self,
        number: int = 0,
        selection: Selected = NO_MEMBERS,
        placements: Sequence[RankPlacement] = (),
        restore: Restore | None = None,
    ) -> None:
        self.number = number
        self.selection = selection
        self.placements = tuple(placements)
        self.restore = restore
        self.pending_faults: list[Fault] = []
        """Not judged yet."""
        self.return_value: dict[str, Any] = {}
        self.step = 0 if restore is None else restore.step
        """The step that its furthest rank works on, counted from 1."""
        self._fenced = False
        self._workers = {worker.index: worker for worker in selection.members}
        self._ranks = {place.worker: place.rank for place in self.placements}
        self._active: set[int] = set()
        self._joined: set[int] = set()
        self._restored: set[int] = set()
        self._finished: set[int] = set()
        self._process_states: dict[int, InProcessStateInfo] = {}

    @cached_property
    def world_size(self) -> int:
        return len(self.placements)

    @cached_property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """The members, by rank."""
        return tuple(self._workers[place.worker] for place in self.placements)

    @cached_property
    def members(self) -> frozenset[int]:
        """The members' indices."""
        return frozenset(self._workers)

    @cached_property
    def multi_node(self) -> bool:
        """Whether it lies on several nodes."""
        return len({worker.node_id for worker in self._workers.values()}) > 1

    @property
    def fenced(self) -> bool:
        """Whether it ends: its members leave, and a crash of theirs is no fault any more."""
        return self._fenced

    @property
    def active(self) -> frozenset[int]:
        """The members that have not left the user's function."""
        return frozenset(self._active)

    @property
    def all_left(self) -> bool:
        """Whether every member has left the user's function."""
        return not self._active

    def is_active(self, worker: int) -> bool:
        """Whether that member is in the user's function."""
        return worker in self._active

    @property
    def any_finished(self) -> bool:
        """Whether some member's function returned: there is nothing left to resize for."""
        return bool(self._finished)

    @property
    def all_finished(self) -> bool:
        """Whether every member's function returned."""
        return bool(self.placements) and len(self._finished) == self.world_size

    @property
    def all_joined(self) -> bool:
        """Whether every member joined the process group."""
        return len(self._joined) == self.world_size > 0

    @property
    def all_restored(self) -> bool:
        """Whether every member has an engine, its state loaded: it can be moved without loss."""
        return len(self._restored) == self.world_size > 0

    def rank_of(self, worker: int) -> int | None:
        return self._ranks.get(worker)

    def in_process_states(self) -> InProcessStates:
        """What is in the memory of the members that were unwound; those that died forget."""
        by_rank = {
            self._ranks[worker]: (worker, one) for worker, one in self._process_states.items()
        }
        return InProcessStates(self.world_size, by_rank)

    def fence(self) -> None:
        """A fault or a stop ends the generation."""
        self._fenced = True

    def mark_assigned(self) -> None:
        """The members are being told their places."""
        self._active |= self.members

    def advance_to(self, step: int) -> None:
        """Some rank works on that step."""
        self.step = max(self.step, step)

    def on_heartbeat(self, worker: int, beat: Heartbeat) -> bool:
        """Whether that heartbeat is of a member that is in."""
        if worker not in self._active or beat.rank != self._ranks[worker]:
            return False
        # Ranks go in step, and a lost one may not have told its newest: take the furthest.
        if beat.step > self.step:
            self.step = beat.step
        return True

    def on_joined(self, worker: int, message: Joined) -> bool:
        """A member has joined. Whether it was the last one."""
        if message.generation != self.number or worker not in self._active:
            return False
        self._joined.add(worker)
        return self.all_joined

    def on_restored(self, worker: int, message: Restored) -> bool:
        """A member has the state. Whether it was the last one."""
        if message.generation != self.number or worker not in self._active:
            return False
        self._restored.add(worker)
        self.advance_to(message.step + 1)
        return self.all_restored

    def on_left(self, worker: int, message: Finished | Stopped | Crashed, at_s: float) -> bool:
        """Whether that was a member that is in no longer. A crash is noted in `faults`."""
        if message.generation != self.number or worker not in self._active:
            return False
        self._active.discard(worker)
        self._record_exit(worker, message, at_s)
        return True

    def on_lost(self, worker: int, cause: FaultCause, detail: str, at_s: float) -> Fault | None:
        """A worker's process is gone. The fault, if it was a member that had not finished."""
        self._active.discard(worker)
        self._process_states.pop(worker, None)
        if worker not in self._ranks or worker in self._finished:
            return None
        fault = Fault(
            cause, self._workers[worker], self._ranks[worker], self.step, detail, at_s, self.number
        )
        self.pending_faults.append(fault)
        return fault

    def _record_exit(self, worker: int, message: Finished | Stopped | Crashed, at_s: float) -> None:
        if isinstance(message, Finished):
            self._finished.add(worker)
            if message.rank == 0 and message.result:
                self.return_value = message.result
            return
        if message.memory is not None:
            self._process_states[worker] = message.memory
        if isinstance(message, Crashed) and not self.fenced:
            self.pending_faults.append(
                Fault(
                    FaultCause(message.kind),
                    self._workers[worker],
                    self._ranks[worker],
                    message.step,
                    message.error,
                    at_s,
                    self.number,
                    message.traceback,
                )
            )


CompletedRecovery = Repaired | Resized


@dataclass
class _Timeline:
    """One under way. A fault on a resize's way makes a repair of it."""

    reason: str
    cause: str | None
    world_size: int
    phase_began_s: float
    phase: str
    lost: list[str] = field(default_factory=list)
    step: int = 0
    steps_redone: int = 0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class RecoveryTimer:
    """At most one way is open: what happens on it belongs to it, until a step is finished again."""

    def __init__(self) -> None:
        self.repairs = 0
        self.resizes = 0
        self.steps_redone = 0
        self._current: _Timeline | None = None

    def fault_detected(
        self, cause: str, lost: Iterable[str], world_size: int, since_s: float, now_s: float
    ) -> None:
        """A fault was judged to be repaired; its first sign came at `since_s`."""
        way = self._current
        if way is None:
            way = self._current = _Timeline("", cause, world_size, since_s, "detect")
        way.cause = way.cause or cause
        way.lost += lost
        self.enter_phase("detect", now_s)

    def resize_requested(self, reason: str, world_size: int, now_s: float) -> None:
        """A resize begins."""
        if self._current is None:
            self._current = _Timeline(reason, None, world_size, now_s, "drain")

    def enter_phase(self, part: str, now_s: float) -> None:
        """The part under way is over, and `part` begins."""
        way = self._current
        if way is not None:
            way.seconds[way.phase] += now_s - way.phase_began_s
            way.phase_began_s, way.phase = now_s, part

    def step_selected(self, step: int, steps_redone: int) -> None:
        """The step that is gone back to. A second way back counts only what is lost besides."""
        if self._current is not None:
            self._current.step = step
            self._current.steps_redone += steps_redone
        self.steps_redone += steps_redone

    def completed(self, step_s: float, world_size: int, now_s: float) -> CompletedRecovery | None:
        """A step was finished that took `step_s`: what is now passed, if something was open."""
        way = self._current
        if way is None or way.phase not in ("load", "recompute"):
            return None  # a step of the generation that is being left
        self._current = None
        way.seconds[way.phase] += max(0.0, now_s - way.phase_began_s - step_s)
        seconds = dict(way.seconds)
        if way.cause is None:
            self.resizes += 1
            return Resized(way.reason, way.step, way.world_size, world_size, seconds)
        self.repairs += 1
        return Repaired(
            way.cause,
            tuple(way.lost),
            way.step,
            way.steps_redone,
            way.world_size,
            world_size,
            seconds,
        )
