"""Attributes every second of a job's wall time to one category. No clock, no I/O.

Time is unattributed at first, because its category is known only later. A finished step gets its
own duration; the rest of the time belongs to what delayed the step. The categories and the
unattributed time always add up to the wall time, in whole nanoseconds, in any order of events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rayzero.orchestrator.machine import State

_NS_PER_S = 1_000_000_000


class TimeCategory(StrEnum):
    """A use of a job's time. The values are the `cause` label of `rayzero_time_seconds_total`."""

    PRODUCTIVE = "productive"
    """A step that counts."""
    REDONE = "redone"
    """A step that had finished before, and was lost."""
    INTERRUPTED = "interrupted"
    """A step that a fault aborted, and the time until the fault was detected."""
    DATA = "data"
    """Waiting for data, on the rank that waited longest."""
    MIRROR = "mirror"
    """Copying the training state into the vaults."""
    CHECKPOINT = "checkpoint"
    """Copying the training state for a checkpoint."""
    DETECT = "recovery_detect"
    FENCE = "recovery_fence"
    SELECT_STEP = "recovery_select_step"
    RENDEZVOUS = "recovery_rendezvous"
    LOAD = "recovery_load"
    RECOMPUTE = "recovery_recompute"
    """From the loaded state to the next finished step, without that step."""
    WAITING = "waiting"
    """Waiting for workers, in a recovery or a resize."""
    RESIZING = "resizing"
    STARTING = "starting"
    """Everything before the first step."""
    FINISHING = "finishing"
    """From the last step to the end."""
    STOPPING = "stopping"
    ADOPTION = "adoption"
    """From the last journal entry of a lost run to its adoption."""


PHASE_CATEGORY = {
    "detect": TimeCategory.DETECT,
    "drain": TimeCategory.RESIZING,
    "fence": TimeCategory.FENCE,
    "select_step": TimeCategory.SELECT_STEP,
    "select_members": TimeCategory.WAITING,
    "rendezvous": TimeCategory.RENDEZVOUS,
    "load": TimeCategory.LOAD,
    "recompute": TimeCategory.RECOMPUTE,
}
"""Categories of the phases in `Repaired.seconds`."""

_UNFINISHED_CATEGORY = {
    State.RECOVERING: TimeCategory.INTERRUPTED,
    State.RESIZING: TimeCategory.RESIZING,
}
"""Categories of a reconfiguration that does not finish."""


@dataclass(frozen=True)
class TimeBreakdown:
    """The attribution at one moment; `seconds` and `unattributed_s` add up to `wall_s`."""

    seconds: Mapping[str, float]
    unattributed_s: float
    wall_s: float

    @property
    def goodput(self) -> float:
        """Share of the wall time that was spent in steps that count; 0 at the start."""
        return self.seconds[TimeCategory.PRODUCTIVE] / self.wall_s if self.wall_s else 0.0


class TimeAccounting:
    """Attributes one run's time, from `now_s` up to its final state. All times are of one clock. If
    the clock goes back, that counts as no time."""

    def __init__(self, now_s: float) -> None:
        self._now_ns = _to_ns(now_s)
        self._booked_ns = dict.fromkeys(TimeCategory, 0)
        self._unattributed_ns = 0
        self._deferred_ns = dict.fromkeys(
            (TimeCategory.DATA, TimeCategory.MIRROR, TimeCategory.CHECKPOINT), 0
        )
        """Reported waits for which there was no unattributed time yet, because the records of steps
        may arrive late, and several at once."""
        self._state = State.PENDING
        self._reconfiguration: State | None = None
        self._best_step: int | None = None
        """The highest step ever finished; None before the first."""
        self._offline_ns = 0
        self._has_stepped = False
        """Whether a step has finished in this process."""

    def restore(self, seconds: Mapping[str, float], best_step: int, ago_s: float) -> None:
        """Continues the attribution of a lost run, which began `ago_s` ago. Called before any
        event of this run. Time that the lost run has not attributed, including the time since its
        loss, becomes ADOPTION."""
        for category in TimeCategory:
            self._booked_ns[category] = max(0, _to_ns(seconds.get(category, 0.0)))
        unbooked_ns = _to_ns(ago_s) - sum(self._booked_ns.values())
        self._offline_ns = max(0, unbooked_ns)  # clocks may be adjusted
        self._booked_ns[TimeCategory.ADOPTION] += self._offline_ns
        self._best_step = best_step or None

    def on_reattached(self) -> None:
        """Called when the workers of the lost run have trained on. The time that `restore` has
        booked as ADOPTION then belongs to the next step."""
        self._booked_ns[TimeCategory.ADOPTION] -= self._offline_ns
        self._unattributed_ns += self._offline_ns
        self._offline_ns, self._has_stepped = 0, True

    def on_state(self, state: State, now_s: float) -> None:
        if self._state.is_final:
            return
        self._advance(now_s)
        before, self._state = self._state, state
        if state in _UNFINISHED_CATEGORY:
            # A fault during a resize turns it into a recovery.
            if self._reconfiguration is not State.RECOVERING:
                self._reconfiguration = state
        elif state.is_final:
            self._book_all(self._final_category(before, state))
        elif state is State.STOPPING and self._reconfiguration is not None:
            self._book_all(_UNFINISHED_CATEGORY[self._reconfiguration])
            self._reconfiguration = None

    def on_step(
        self, step: int, step_s: float, waits_s: Mapping[TimeCategory, float], now_s: float
    ) -> None:
        """Attributes the time of a finished step.

        Args:
            step_s: duration of the step.
            waits_s: the part of the duration that was not training: data, mirror, checkpoint.
        """
        self._advance(now_s)
        for category in self._deferred_ns:
            self._deferred_ns[category] += max(0, _to_ns(waits_s.get(category, 0.0)))
        first, self._has_stepped = not self._has_stepped, True
        is_redone = self._best_step is not None and step <= self._best_step
        # Earlier steps that finished, but that no surviving rank has reported, count like this one.
        count = 1 if first else max(1, step - (self._best_step or 0))
        steady = self._state is State.RUNNING and self._reconfiguration is None and not first
        # In steady state all time since the last record belongs to this step, or to the steps that
        # are reported with it.
        spent_ns = self._unattributed_ns
        if not steady:
            spent_ns = min(spent_ns, max(0, _to_ns(step_s) * count))
        rest_ns = self._unattributed_ns - spent_ns
        self._unattributed_ns = spent_ns
        for category in self._deferred_ns:
            self._deferred_ns[category] -= self._book(category, self._deferred_ns[category])
        self._book_all(TimeCategory.REDONE if is_redone else TimeCategory.PRODUCTIVE)
        self._unattributed_ns = rest_ns
        if first and self._reconfiguration is None and self._state is State.RUNNING:
            self._book_all(TimeCategory.STARTING)
        self._best_step = max(self._best_step or 0, step)

    def recovery_finished(self, seconds: Mapping[str, float], now_s: float) -> None:
        """Attributes the time of a recovery or a resize. Called after `on_step` of the first step
        that follows.

        Args:
            seconds: duration of each phase, as in `Repaired`.
        """
        self._advance(now_s)
        phases_ns = dict.fromkeys(PHASE_CATEGORY.values(), 0)
        for phase, took_s in seconds.items():
            phases_ns[PHASE_CATEGORY.get(phase, TimeCategory.RECOMPUTE)] += max(0, _to_ns(took_s))
        if self._reconfiguration is State.RESIZING:
            self._book(TimeCategory.WAITING, phases_ns[TimeCategory.WAITING])
            self._book_all(TimeCategory.RESIZING)
        else:
            total_ns, available_ns = sum(phases_ns.values()), self._unattributed_ns
            for category, took_ns in phases_ns.items():
                # Phases that overlap the time of a step are scaled down.
                fits = total_ns <= available_ns
                self._book(category, took_ns if fits else took_ns * available_ns // total_ns)
            self._book_all(TimeCategory.INTERRUPTED)
        self._reconfiguration = None

    def breakdown_at(self, now_s: float) -> TimeBreakdown:
        since_ns = 0 if self._state.is_final else max(0, _to_ns(now_s) - self._now_ns)
        booked_ns, unattributed_ns = self.totals_ns()
        unattributed_ns += since_ns
        return TimeBreakdown(
            {category.value: spent_ns / _NS_PER_S for category, spent_ns in booked_ns.items()},
            unattributed_ns / _NS_PER_S,
            (sum(booked_ns.values()) + unattributed_ns) / _NS_PER_S,
        )

    def totals_ns(self) -> tuple[dict[TimeCategory, int], int]:
        """Returns the time by category and the unattributed time, in ns, up to the last event.
        Together they are the wall time."""
        return dict(self._booked_ns), self._unattributed_ns

    def _final_category(self, before: State, final: State) -> TimeCategory:
        """Returns the category of the time between the last event and the job's end."""
        if before is State.STOPPING:
            return TimeCategory.STOPPING
        if self._reconfiguration is None and before is not State.RUNNING:
            return TimeCategory.STARTING
        if final is State.SUCCEEDED:
            return TimeCategory.FINISHING
        return _UNFINISHED_CATEGORY[self._reconfiguration or State.RECOVERING]

    def _advance(self, now_s: float) -> None:
        if self._state.is_final:
            return
        now_ns = max(self._now_ns, _to_ns(now_s))
        self._unattributed_ns += now_ns - self._now_ns
        self._now_ns = now_ns

    def _book(self, category: TimeCategory, spent_ns: int) -> int:
        """Attributes `spent_ns`, or all unattributed time if that is less. Returns how much."""
        booked_ns = min(spent_ns, self._unattributed_ns)
        self._booked_ns[category] += booked_ns
        self._unattributed_ns -= booked_ns
        return booked_ns

    def _book_all(self, category: TimeCategory) -> None:
        self._book(category, self._unattributed_ns)


def _to_ns(seconds: float) -> int:
    return round(seconds * _NS_PER_S)
