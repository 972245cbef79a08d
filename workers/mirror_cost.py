"""The cost of mirroring for training, and the interval that bounds it."""

from __future__ import annotations

from math import ceil, inf
from time import perf_counter

MIRROR_COST_FRACTION = 0.05
"""The fraction of training time for mirroring, if the interval is chosen automatically."""
SMOOTHING_FACTOR = 0.2
_REMEASURE_STEPS = 200


class CopyCost:
    """Smoothed durations of a step and of a mirror that training waits for, with its checksum."""

    def __init__(self) -> None:
        self._step_s = 0.0
        self._mirror_s = 0.0
        self._last_step_at_s = perf_counter()

    @property
    def interval_steps(self) -> float:
        """Steps between two mirrors that keep their cost within `MIRROR_COST_FRACTION`."""
        if not self._mirror_s or not self._step_s:
            return 1.0
        return float(max(1, ceil(self._mirror_s / (MIRROR_COST_FRACTION * self._step_s) - 0.25)))

    def step_finished(self, mirrored: bool | None) -> None:
        """A step ended. `mirrored`: the state of the one before was mirrored; None: into a new
        slot, which is slower."""
        self._step_s = smooth(self._step_s, self._since_last_step(), limit=2)

    def mirror_finished(self, seconds: float) -> None:
        self._mirror_s = smooth(self._mirror_s, seconds)

    def _since_last_step(self) -> float:
        now = perf_counter()
        took_s, self._last_step_at_s = now - self._last_step_at_s, now
        return took_s


class BesideCost(CopyCost):
    """The cost of mirrors concurrent with the next step, however long they take: how much longer
    that step is than one without a mirror, including its wait for the commit."""

    def __init__(self) -> None:
        super().__init__()
        self._mirrored_step_s = 0.0
        self._warmup_steps = 2
        self._unmirrored_age = _REMEASURE_STEPS  # steps since the last one without a mirror

    @property
    def interval_steps(self) -> float:
        """The interval of `CopyCost`; 2 while steps with or without a mirror are to be measured."""
        if self._unmirrored_age >= _REMEASURE_STEPS or not self._mirrored_step_s:
            return 2.0
        return super().interval_steps

    def step_finished(self, mirrored: bool | None) -> None:
        took_s = self._since_last_step()
        self._unmirrored_age += 1
        if self._warmup_steps > 0:
            self._warmup_steps -= 1
        elif mirrored:
            self._mirrored_step_s = smooth(self._mirrored_step_s, took_s, limit=2)
        elif mirrored is False:
            self._unmirrored_age = 0
            self._step_s = smooth(self._step_s, took_s, limit=2)
        if self._step_s and self._mirrored_step_s:
            self._mirror_s = max(0.0, self._mirrored_step_s - self._step_s)


def smooth(before: float, now: float, *, limit: float = inf) -> float:
    """An exponential moving average; `now` if there is no value before. Counts at most `limit`
    times the average: an evaluation between two steps is none of them."""
    return before + SMOOTHING_FACTOR * (min(now, limit * before) - before) if before else now
