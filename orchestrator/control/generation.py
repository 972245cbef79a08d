"""The members of one generation and their progress, and the timing of recoveries. Pure."""

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
    """The members of one generation and the state of each. Number 0 has no members.

    A member is *active* from its assignment until its function has returned, failed or been
    unwound, or its process ended: a generation without active members can do nothing more.
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
        """Faults that the failure policy has not decided yet."""
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
        """Whether its members are on several nodes."""
        return len({worker.node_id for worker in self._workers.values()}) > 1

    @property
    def fenced(self) -> bool:
        """Whether it is being ended: its members leave, and a crash is no longer a fault."""
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
        """Whether that member has an assignment and has not left."""
        return worker in self._active

    @property
    def any_finished(self) -> bool:
        """Whether some member's function returned: a resize is pointless."""
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
        """Whether every member has an engine with its state loaded: a resize loses nothing."""
        return len(self._restored) == self.world_size > 0

    def rank_of(self, worker: int) -> int | None:
        return self._ranks.get(worker)

    def in_process_states(self) -> InProcessStates:
        """The states in the memory of unwound members whose processes are alive."""
        by_rank = {
            self._ranks[worker]: (worker, state) for worker, state in self._process_states.items()
        }
        return InProcessStates(self.world_size, by_rank)

    def fence(self) -> None:
        """A fault or a stop ends the generation."""
        self._fenced = True

    def mark_assigned(self) -> None:
        """The members' assignments are being sent."""
        self._active |= self.members

    def advance_to(self, step: int) -> None:
        """Some rank works on that step."""
        self.step = max(self.step, step)

    def on_heartbeat(self, worker: int, beat: Heartbeat) -> bool:
        """Records a heartbeat. False if its sender is no active member."""
        if worker not in self._active or beat.rank != self._ranks[worker]:
            return False
        # Ranks proceed in lockstep, and a lost one may not have reported its newest: the maximum.
        if beat.step > self.step:
            self.step = beat.step
        return True

    def on_joined(self, worker: int, message: Joined) -> bool:
        """Records a member that joined. True if it was the last one."""
        if message.generation != self.number or worker not in self._active:
            return False
        self._joined.add(worker)
        return self.all_joined

    def on_restored(self, worker: int, message: Restored) -> bool:
        """Records a member that loaded its state. True if it was the last one."""
        if message.generation != self.number or worker not in self._active:
            return False
        self._restored.add(worker)
        self.advance_to(message.step + 1)
        return self.all_restored

    def on_left(self, worker: int, message: Finished | Stopped | Crashed, at_s: float) -> bool:
        """Records a member that left; a crash becomes a fault. False if it was not active."""
        if message.generation != self.number or worker not in self._active:
            return False
        self._active.discard(worker)
        self._record_exit(worker, message, at_s)
        return True

    def on_lost(self, worker: int, cause: FaultCause, detail: str, at_s: float) -> Fault | None:
        """Records a lost process. Returns the fault if it was a member that had not finished."""
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
    """The current recovery or resize. A fault during a resize turns it into a recovery."""

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
    """Times the phases from a fault or a resize to the next finished step; one at a time.

    The phases: detect, fence or drain, select_step, select_members, rendezvous, load, recompute.
    """

    def __init__(self) -> None:
        self.repairs = 0
        self.resizes = 0
        self.steps_redone = 0
        self._current: _Timeline | None = None

    def fault_detected(
        self, cause: str, lost: Iterable[str], world_size: int, since_s: float, now_s: float
    ) -> None:
        """The policy decided to recover from a fault whose first sign came at `since_s`."""
        timeline = self._current
        if timeline is None:
            timeline = self._current = _Timeline("", cause, world_size, since_s, "detect")
        timeline.cause = timeline.cause or cause
        timeline.lost += lost
        self.enter_phase("detect", now_s)

    def resize_requested(self, reason: str, world_size: int, now_s: float) -> None:
        """A resize begins."""
        if self._current is None:
            self._current = _Timeline(reason, None, world_size, now_s, "drain")

    def enter_phase(self, phase: str, now_s: float) -> None:
        """Ends the current phase and begins another one."""
        timeline = self._current
        if timeline is not None:
            timeline.seconds[timeline.phase] += now_s - timeline.phase_began_s
            timeline.phase_began_s, timeline.phase = now_s, phase

    def step_selected(self, step: int, steps_redone: int) -> None:
        """The step to resume from. `steps_redone` counts only steps not counted before."""
        if self._current is not None:
            self._current.step = step
            self._current.steps_redone += steps_redone
        self.steps_redone += steps_redone

    def completed(self, step_s: float, world_size: int, now_s: float) -> CompletedRecovery | None:
        """A step was finished that took `step_s`. Returns the recovery it completes, if any."""
        timeline = self._current
        if timeline is None or timeline.phase not in ("load", "recompute"):
            return None  # a step of the previous generation
        self._current = None
        timeline.seconds[timeline.phase] += max(0.0, now_s - timeline.phase_began_s - step_s)
        seconds = dict(timeline.seconds)
        if timeline.cause is None:
            self.resizes += 1
            return Resized(timeline.reason, timeline.step, timeline.world_size, world_size, seconds)
        self.repairs += 1
        return Repaired(
            timeline.cause,
            tuple(timeline.lost),
            timeline.step,
            timeline.steps_redone,
            timeline.world_size,
            world_size,
            seconds,
        )
