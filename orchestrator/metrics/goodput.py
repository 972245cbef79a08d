"""Where a job's wall time went: every second since it began belongs to one cause. Pure.

Time that is not booked yet lies in a pool: what it was becomes known when it is over. A finished
step takes its own seconds out of the pool; what is left beside a step is what stood in its way.
Causes and pool add up to the wall time, in whole nanoseconds, whatever comes in which order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rayzero.orchestrator.states import State

_NS = 1_000_000_000


class Why(StrEnum):
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
    NOTICE = "recovery_notice"
    FENCE = "recovery_fence"
    PICK = "recovery_pick"
    FORM = "recovery_form"
    LOAD = "recovery_load"
    REDO = "recovery_redo"
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


WAYS = {
    "notice": Why.NOTICE,
    "drain": Why.RESIZING,
    "fence": Why.FENCE,
    "pick": Why.PICK,
    "settle": Why.WAITING,
    "form": Why.FORM,
    "load": Why.LOAD,
    "redo": Why.REDO,
}
"""The parts of a `Repaired`, as causes."""

_WAYS = (State.RECOVERING, State.RESIZING)


@dataclass(frozen=True)
class Times:
    """An account at one moment.

    Args:
        seconds: what is booked, by cause.
        pending_s: what is not booked yet.
        wall_s: all of it.
    """

    seconds: Mapping[Why, float]
    pending_s: float
    wall_s: float

    @property
    def goodput(self) -> float:
        """The share of the wall time that went into steps that count; 0 at the very beginning."""
        return self.seconds[Why.PRODUCTIVE] / self.wall_s if self.wall_s else 0.0


class Account:
    """Books one run's time, up to its final state. Times are of one clock; one that goes back
    counts as no time.

    Args:
        now_s: when the run began.
    """

    def __init__(self, now_s: float) -> None:
        self._begun_ns = self._now_ns = _ns(now_s)
        self._booked_ns = dict.fromkeys(Why, 0)
        self._pool_ns = 0
        self._owed_ns = dict.fromkeys((Why.DATA, Why.MIRROR, Why.CHECKPOINT), 0)
        """Waits inside of steps that were told before their time came in: steps come in bunches."""
        self._state = State.PENDING
        self._way: State | None = None
        self._best_step: int | None = None
        """The furthest step ever finished; None before the first."""
        self._started = False
        """Whether a step was finished since the job's process began."""

    def go_on(self, seconds: Mapping[str, float], best_step: int, ago_s: float) -> None:
        """Goes on with the account of a lost run, before anything is told to this one. What that
        run had not booked, and the time since, is ADOPTION.

        Args:
            seconds: what it had booked, by cause.
            best_step: the furthest step that it had finished.
            ago_s: how long ago it began.
        """
        for why in Why:
            self._booked_ns[why] = max(0, _ns(seconds.get(why, 0.0)))
        booked_ns = sum(self._booked_ns.values())
        self._begun_ns = self._now_ns - max(booked_ns, _ns(ago_s))  # clocks may have been set
        self._booked_ns[Why.ADOPTION] += self._now_ns - self._begun_ns - booked_ns
        self._best_step = best_step or None

    def entered(self, state: State, now_s: float) -> None:
        """The job is in another state."""
        if self._state.is_final:
            return
        self._pass(now_s)
        before, self._state = self._state, state
        if state in _WAYS:
            # A fault on the way of a resize makes a repair of it.
            self._way = state if self._way is not State.RECOVERING else self._way
        elif state is State.STOPPING:
            if self._way is not None:
                self._book_all(self._aimless)
        elif state.is_final:
            self._book_all(self._last(before, state))
        if state is State.STOPPING or state.is_final:
            self._way = None

    def stepped(self, step: int, step_s: float, waits_s: Mapping[Why, float], now_s: float) -> None:
        """A step was finished.

        Args:
            step_s: how long it took.
            waits_s: of that, what was no training: data, mirror, checkpoint.
        """
        self._pass(now_s)
        for why in self._owed_ns:
            self._owed_ns[why] += max(0, _ns(waits_s.get(why, 0.0)))
        first, self._started = not self._started, True
        again = self._best_step is not None and step <= self._best_step
        # One that was finished, but that no rank lived to report, counts as this one does.
        count = 1 if first else max(1, step - (self._best_step or 0))
        steady = self._state is State.RUNNING and self._way is None and not first
        # Steady, all the time since the last step was this one's, and its bunch's.
        spent_ns = self._pool_ns if steady else min(self._pool_ns, max(0, _ns(step_s) * count))
        rest_ns = self._pool_ns - spent_ns
        self._pool_ns = spent_ns
        for why in self._owed_ns:
            self._owed_ns[why] -= self._book(why, self._owed_ns[why])
        self._book_all(Why.REDONE if again else Why.PRODUCTIVE)
        self._pool_ns = rest_ns
        if first and self._way is None and self._state is State.RUNNING:
            self._book_all(Why.STARTING)
        self._best_step = max(self._best_step or 0, step)

    def passed(self, seconds: Mapping[str, float], now_s: float) -> None:
        """The job is past a fault or a resize: what each part of the way took, as in `Repaired`.
        Comes behind the first step after it."""
        self._pass(now_s)
        whys = dict.fromkeys(WAYS.values(), 0)
        for part, took_s in seconds.items():
            whys[WAYS.get(part, Why.REDO)] += max(0, _ns(took_s))
        if self._way is State.RESIZING:
            self._book(Why.WAITING, whys[Why.WAITING])
            self._book_all(Why.RESIZING)
        else:
            told_ns, pool_ns = sum(whys.values()), self._pool_ns
            for why, took_ns in whys.items():
                # What was told as well as a step's time cannot be had twice.
                fits = took_ns if told_ns <= pool_ns else took_ns * pool_ns // told_ns
                self._book(why, fits)
            self._book_all(Why.INTERRUPTED)
        self._way = None

    def at(self, now_s: float) -> Times:
        """The account as it stands; it is not changed."""
        late_ns = 0 if self._state.is_final else max(0, _ns(now_s) - self._now_ns)
        booked, pool_ns, wall_ns = self.nanoseconds()
        seconds = {why: spent / _NS for why, spent in booked.items()}
        return Times(seconds, (pool_ns + late_ns) / _NS, (wall_ns + late_ns) / _NS)

    def nanoseconds(self) -> tuple[dict[Why, int], int, int]:
        """(booked by cause, in the pool, in all), up to the last that was told."""
        return dict(self._booked_ns), self._pool_ns, self._now_ns - self._begun_ns

    @property
    def _aimless(self) -> Why:
        """What a way was that came to nothing."""
        return Why.RESIZING if self._way is State.RESIZING else Why.INTERRUPTED

    def _last(self, before: State, final: State) -> Why:
        """What the time up to the job's end was."""
        if before is State.STOPPING:
            return Why.STOPPING
        if self._way is not None:
            return self._aimless if final is not State.SUCCEEDED else Why.FINISHING
        if before is not State.RUNNING:
            return Why.STARTING
        return Why.FINISHING if final is State.SUCCEEDED else Why.INTERRUPTED

    def _pass(self, now_s: float) -> None:
        if self._state.is_final:
            return
        now_ns = max(self._now_ns, _ns(now_s))
        self._pool_ns += now_ns - self._now_ns
        self._now_ns = now_ns

    def _book(self, why: Why, wanted_ns: int) -> int:
        """As much of it as there is; how much that was."""
        booked_ns = min(wanted_ns, self._pool_ns)
        self._booked_ns[why] += booked_ns
        self._pool_ns -= booked_ns
        return booked_ns

    def _book_all(self, why: Why) -> None:
        self._book(why, self._pool_ns)


def _ns(seconds: float) -> int:
    return round(seconds * _NS)
