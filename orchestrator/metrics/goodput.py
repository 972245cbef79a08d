"""Where a job's wall time went: every second since it began belongs to one cause. Pure.

Time that is not booked yet lies in a pool: what it was becomes known when it is over. A finished
step takes its own seconds out of the pool; what is left beside a step is what stood in its way.
Causes and pool add up to the wall time, in whole nanoseconds, whatever comes in which order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rayzero.orchestrator.machine import State

_NS_PER_S = 1_000_000_000


class TimeCategory(StrEnum):
    """What a second was spent on."""

    PRODUCTIVE = "productive"
    """A step that counts."""
    REDONE = "redone"
    """A step that had been finished before, and was lost."""
    INTERRUPTED = "interrupted"
    """A step that a fault broke off, and the wait until that fault showed."""
    DATA = "data"
    """Waiting for samples, on the rank that waited longest."""
    MIRROR = "mirror"
    """Copying the state into the vaults."""
    CHECKPOINT = "checkpoint"
    """The same for a checkpoint."""
    DETECT = "recovery_detect"
    FENCE = "recovery_fence"
    SELECT_STEP = "recovery_select_step"
    RENDEZVOUS = "recovery_rendezvous"
    LOAD = "recovery_load"
    RECOMPUTE = "recovery_recompute"
    """Getting from the loaded state to the next finished step, without that step."""
    WAITING = "waiting"
    """Waiting for workers, in a repair or a resize."""
    RESIZING = "resizing"
    STARTING = "starting"
    """Everything before the first step."""
    FINISHING = "finishing"
    """From the last step to the end."""
    STOPPING = "stopping"
    ADOPTION = "adoption"
    """From the last that a lost run wrote down to its adoption."""


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
"""The parts of a `Repaired`, as causes."""

_RECONFIGURING_STATES = (State.RECOVERING, State.RESIZING)


@dataclass(frozen=True)
class TimeBreakdown:
    """An account at one moment.

    Args:
        seconds: what is booked, by cause.
        pending_s: what is not booked yet.
        wall_s: all of it.
    """

    seconds: Mapping[TimeCategory, float]
    unattributed_s: float
    wall_s: float

    @property
    def goodput(self) -> float:
        """The share of the wall time that went into steps that count; 0 at the very beginning."""
        return self.seconds[TimeCategory.PRODUCTIVE] / self.wall_s if self.wall_s else 0.0


class TimeAccounting:
    """Books one run's time, up to its final state. Times are of one clock; one that goes back
    counts as no time.

    Args:
        now_s: when the run began.
    """

    def __init__(self, now_s: float) -> None:
        self._start_ns = self._now_ns = _to_ns(now_s)
        self._booked_ns = dict.fromkeys(TimeCategory, 0)
        self._unattributed_ns = 0
        self._deferred_ns = dict.fromkeys(
            (TimeCategory.DATA, TimeCategory.MIRROR, TimeCategory.CHECKPOINT), 0
        )
        """Waits inside of steps that were told before their time came in: steps come in bunches."""
        self._state = State.PENDING
        self._reconfiguration: State | None = None
        self._best_step: int | None = None
        """The furthest step ever finished; None before the first."""
        self._has_stepped = False
        """Whether a step was finished since the job's process began."""

    def restore(self, seconds: Mapping[str, float], best_step: int, ago_s: float) -> None:
        """Goes on with the account of a lost run, before anything is told to this one. What that
        run had not booked, and the time since, is ADOPTION.

        Args:
            seconds: what it had booked, by cause.
            best_step: the furthest step that it had finished.
            ago_s: how long ago it began.
        """
        for why in TimeCategory:
            self._booked_ns[why] = max(0, _to_ns(seconds.get(why, 0.0)))
        booked_ns = sum(self._booked_ns.values())
        self._start_ns = self._now_ns - max(booked_ns, _to_ns(ago_s))  # clocks may have been set
        self._booked_ns[TimeCategory.ADOPTION] += self._now_ns - self._start_ns - booked_ns
        self._best_step = best_step or None

    def on_state(self, state: State, now_s: float) -> None:
        """The job is in another state."""
        if self._state.is_final:
            return
        self._advance(now_s)
        before, self._state = self._state, state
        if state in _RECONFIGURING_STATES:
            # A fault on the way of a resize makes a repair of it.
            self._reconfiguration = (
                state if self._reconfiguration is not State.RECOVERING else self._reconfiguration
            )
        elif state is State.STOPPING:
            if self._reconfiguration is not None:
                self._book_all(self._unfinished_category)
        elif state.is_final:
            self._book_all(self._final_category(before, state))
        if state is State.STOPPING or state.is_final:
            self._reconfiguration = None

    def on_step(
        self, step: int, step_s: float, waits_s: Mapping[TimeCategory, float], now_s: float
    ) -> None:
        """A step was finished.

        Args:
            step_s: how long it took.
            waits_s: of that, what was no training: data, mirror, checkpoint.
        """
        self._advance(now_s)
        for why in self._deferred_ns:
            self._deferred_ns[why] += max(0, _to_ns(waits_s.get(why, 0.0)))
        first, self._has_stepped = not self._has_stepped, True
        again = self._best_step is not None and step <= self._best_step
        # One that was finished, but that no rank lived to report, counts as this one does.
        count = 1 if first else max(1, step - (self._best_step or 0))
        steady = self._state is State.RUNNING and self._reconfiguration is None and not first
        # Steady, all the time since the last step was this one's, and its bunch's.
        spent_ns = (
            self._unattributed_ns
            if steady
            else min(self._unattributed_ns, max(0, _to_ns(step_s) * count))
        )
        rest_ns = self._unattributed_ns - spent_ns
        self._unattributed_ns = spent_ns
        for why in self._deferred_ns:
            self._deferred_ns[why] -= self._book(why, self._deferred_ns[why])
        self._book_all(TimeCategory.REDONE if again else TimeCategory.PRODUCTIVE)
        self._unattributed_ns = rest_ns
        if first and self._reconfiguration is None and self._state is State.RUNNING:
            self._book_all(TimeCategory.STARTING)
        self._best_step = max(self._best_step or 0, step)

    def recovery_finished(self, seconds: Mapping[str, float], now_s: float) -> None:
        """The job is past a fault or a resize: what each part of the way took, as in `Repaired`.
        Comes behind the first step after it."""
        self._advance(now_s)
        whys = dict.fromkeys(PHASE_CATEGORY.values(), 0)
        for part, took_s in seconds.items():
            whys[PHASE_CATEGORY.get(part, TimeCategory.RECOMPUTE)] += max(0, _to_ns(took_s))
        if self._reconfiguration is State.RESIZING:
            self._book(TimeCategory.WAITING, whys[TimeCategory.WAITING])
            self._book_all(TimeCategory.RESIZING)
        else:
            told_ns, pool_ns = sum(whys.values()), self._unattributed_ns
            for why, took_ns in whys.items():
                # What was told as well as a step's time cannot be had twice.
                fits = took_ns if told_ns <= pool_ns else took_ns * pool_ns // told_ns
                self._book(why, fits)
            self._book_all(TimeCategory.INTERRUPTED)
        self._reconfiguration = None

    def breakdown_at(self, now_s: float) -> TimeBreakdown:
        """The account as it stands; it is not changed."""
        late_ns = 0 if self._state.is_final else max(0, _to_ns(now_s) - self._now_ns)
        booked, pool_ns, wall_ns = self.totals_ns()
        seconds = {why: spent / _NS_PER_S for why, spent in booked.items()}
        return TimeBreakdown(
            seconds, (pool_ns + late_ns) / _NS_PER_S, (wall_ns + late_ns) / _NS_PER_S
        )

    def totals_ns(self) -> tuple[dict[TimeCategory, int], int, int]:
        """(booked by cause, in the pool, in all), up to the last that was told."""
        return dict(self._booked_ns), self._unattributed_ns, self._now_ns - self._start_ns

    @property
    def _unfinished_category(self) -> TimeCategory:
        """What a way was that came to nothing."""
        return (
            TimeCategory.RESIZING
            if self._reconfiguration is State.RESIZING
            else TimeCategory.INTERRUPTED
        )

    def _final_category(self, before: State, final: State) -> TimeCategory:
        """What the time up to the job's end was."""
        if before is State.STOPPING:
            return TimeCategory.STOPPING
        if self._reconfiguration is not None:
            return (
                self._unfinished_category
                if final is not State.SUCCEEDED
                else TimeCategory.FINISHING
            )
        if before is not State.RUNNING:
            return TimeCategory.STARTING
        return TimeCategory.FINISHING if final is State.SUCCEEDED else TimeCategory.INTERRUPTED

    def _advance(self, now_s: float) -> None:
        if self._state.is_final:
            return
        now_ns = max(self._now_ns, _to_ns(now_s))
        self._unattributed_ns += now_ns - self._now_ns
        self._now_ns = now_ns

    def _book(self, why: TimeCategory, wanted_ns: int) -> int:
        """As much of it as there is; how much that was."""
        booked_ns = min(wanted_ns, self._unattributed_ns)
        self._booked_ns[why] += booked_ns
        self._unattributed_ns -= booked_ns
        return booked_ns

    def _book_all(self, why: TimeCategory) -> None:
        self._book(why, self._unattributed_ns)


def _to_ns(seconds: float) -> int:
    return round(seconds * _NS_PER_S)
