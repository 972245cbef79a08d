"""Faults, repairs and checkpoints: what they were and what they cost. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from rayzero.orchestrator.metrics.goodput import WAYS
from rayzero.orchestrator.metrics.histogram import Histogram
from rayzero.orchestrator.metrics.series import (
    CHECKPOINT_BUCKETS_S,
    REPAIR_BUCKETS_S,
    STEP_BUCKETS_S,
)
from rayzero.orchestrator.notices import Checkpointed, Repaired
from rayzero.orchestrator.policies.failure import Budget, Fault, spent

_Parts = partial(Histogram, REPAIR_BUCKETS_S)


@dataclass
class Troubles:
    """Args:
    budget: of hardware faults.
    by_cause: faults on record.
    """

    budget: Budget
    by_cause: Counter[str] = field(default_factory=Counter)
    repairs: Counter[str] = field(default_factory=Counter)
    resizes: int = 0
    steps_redone: int = 0
    whole: Histogram = field(default_factory=_Parts)
    parts: dict[str, Histogram] = field(default_factory=lambda: {part: _Parts() for part in WAYS})
    _recent: list[Fault] = field(default_factory=list)

    def judged(self, fault: Fault) -> None:
        self.by_cause[str(fault.cause)] += 1
        since_s = fault.at_s - self.budget.window_s
        self._recent = [one for one in self._recent if one.at_s > since_s]
        self._recent.append(fault)

    def repaired(self, notice: Repaired) -> None:
        self.repairs[notice.cause] += 1
        self.steps_redone += notice.steps_redone
        self.whole.add(notice.total_s)
        for part, seconds in notice.seconds.items():
            self.parts.setdefault(part, _Parts()).add(seconds)

    def spent(self, now_s: float) -> int:
        """How much of the budget is gone at the moment."""
        return spent(self._recent, self.budget, now_s)


@dataclass
class Checkpoints:
    """What was written, and the newest there is; `step` is None when there is none.

    Args:
        wanted: whether the job asks for any.
        since_unix_s: when this run's first step was finished; None before.
    """

    wanted: bool = False
    since_unix_s: float | None = None
    written: int = 0
    failed: int = 0
    step: int | None = None
    at_unix_s: float = 0.0
    nbytes: int = 0
    seconds: Histogram = field(default_factory=partial(Histogram, CHECKPOINT_BUCKETS_S))
    stops: Histogram = field(default_factory=partial(Histogram, STEP_BUCKETS_S))

    def stored(self, notice: Checkpointed, unix_s: float) -> None:
        self.written += 1
        self.nbytes = notice.nbytes
        self.seconds.add(notice.seconds)
        self.stops.add(notice.stopped_s)
        self.found(notice.step, unix_s)

    def stepped(self, unix_s: float) -> None:
        """A step was finished."""
        if self.since_unix_s is None:
            self.since_unix_s = unix_s

    @property
    def owed_unix_s(self) -> float | None:
        """Since when steps are in no checkpoint; None where none is wanted, or nothing is lost."""
        if not self.wanted:
            return None
        return self.since_unix_s if self.step is None else self.at_unix_s

    def found(self, step: int, unix_s: float) -> None:
        """The newest one, by now."""
        self.step, self.at_unix_s = step, unix_s
