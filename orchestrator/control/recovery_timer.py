"""The timing of recoveries. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rayzero.orchestrator.job_events import Repaired, Resized

_BEFORE_STEP = ("load", "recompute")
"""The phases of a recovery that the next finished step ends."""


@dataclass
class _Timeline:
    """The current recovery, or the current resize if there is no cause. A fault during a resize
    turns it into a recovery."""

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
        """Begins the recovery from a fault whose first sign came at `since_s`, or adds the fault to
        the current recovery."""
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
        """Sets the step to resume from. `steps_redone` counts only steps that were not counted
        before."""
        if self._current is not None:
            self._current.step = step
            self._current.steps_redone += steps_redone

    def completed(self, step_s: float, world_size: int) -> Repaired | Resized | None:
        """Ends the timing with a finished step that took `step_s`. Returns the recovery that the
        step completes, if any."""
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
