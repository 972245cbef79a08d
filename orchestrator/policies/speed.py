"""How fast each worker computes, measured step by step, and who is steadily slow."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

WINDOW = 20
"""Steps that a median is taken over."""

SLOW = 1.3
"""A worker is slow when its compute time is above so many times that of the others."""

FAST = 1.15
"""A slow one is fast again below so many times that."""

WORTH_S = 0.03
"""Seconds a step that are worth a word: below that a busy machine's noise looks like slowness."""

_PATIENCE = 10  # judgements in a row that agree before anything is said


@dataclass(frozen=True)
class SpeedChange:
    """A worker became steadily slow, or fast again.

    Args:
        compute_s: its compute seconds a step.
        others_s: the median of the others'.
    """

    worker: int
    slow: bool
    compute_s: float
    others_s: float

    def __str__(self) -> str:
        ratio = self.compute_s / self.others_s
        times = f"{self.compute_s:.3f} s a step, the others {self.others_s:.3f} s"
        if self.slow:
            return f"worker {self.worker} is {ratio:.1f} times slower than the others: {times}"
        return f"worker {self.worker} is no longer slow: {times}"


@dataclass
class _Record:
    """One worker's last steps.

    Attributes:
        typical_s: the median of `compute_s`, once there are enough.
        against: judgements in a row that say otherwise than `slow`.
    """

    compute_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    samples_per_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    typical_s: float | None = None
    slow: bool = False
    against: int = 0


class Speed:
    """Collects the compute seconds of every worker's steps. Knows no clock.

    Compute time is a step's time less the time in which the worker stood waiting for others:
    `step_s - exposed_comm_s`.
    """

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}
        self._typical_s: list[float] = []
        """Every worker's that has one, in order: thousands of workers ask for medians of it."""

    def begin(self, workers: Sequence[int]) -> None:
        """A generation of these workers begins. Those who stay are still known; the split of the
        samples may be another one now, so times are measured anew."""
        self._records = {worker: self._records.get(worker) or _Record() for worker in workers}
        self._typical_s.clear()
        for record in self._records.values():
            record.compute_s.clear()
            record.typical_s = None

    def add(self, worker: int, compute_s: float, samples: float) -> SpeedChange | None:
        """A worker finished a step with so many samples; what is to be said about it.

        A step that took no time is left out: it was not measured.
        """
        record = self._records.setdefault(worker, _Record())
        if compute_s <= 0:
            return None
        record.compute_s.append(compute_s)
        if samples > 0:
            record.samples_per_s.append(samples / compute_s)
        if len(record.compute_s) < WINDOW:
            return None
        if record.typical_s is not None:
            del self._typical_s[bisect_left(self._typical_s, record.typical_s)]
        others_s = _median(self._typical_s)
        record.typical_s = median(record.compute_s)
        insort(self._typical_s, record.typical_s)
        if others_s is None:
            return None
        return self._judge(worker, record, record.typical_s, others_s)

    def samples_per_s(self, workers: Sequence[int]) -> tuple[float | None, ...]:
        """Measured samples per compute second; None for a worker with too few steps."""
        found: list[float | None] = []
        for worker in workers:
            record = self._records.get(worker)
            known = record is not None and len(record.samples_per_s) >= _PATIENCE
            found.append(median(record.samples_per_s) if record is not None and known else None)
        return tuple(found)

    def _judge(
        self, worker: int, record: _Record, compute_s: float, others_s: float
    ) -> SpeedChange | None:
        limit = FAST if record.slow else SLOW
        slow = compute_s > limit * others_s and compute_s - others_s > WORTH_S
        record.against = record.against + 1 if slow != record.slow else 0
        if record.against < _PATIENCE:
            return None
        record.slow, record.against = slow, 0
        return SpeedChange(worker, slow, compute_s, others_s)


def _median(ordered: Sequence[float]) -> float | None:
    middle = len(ordered) // 2
    if not ordered:
        return None
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
