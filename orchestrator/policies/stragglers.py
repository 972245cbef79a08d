"""Speed tracking, load balancing.

How fast each worker computes, measured step by step, and who is steadily slow.

How a step's samples are shared between ranks that are not equally fast. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

WINDOW_STEPS = 20
"""Steps that a median is taken over."""

SLOW_RATIO = 1.3
"""A worker is slow when its compute time is above so many times that of the others."""

RECOVERED_RATIO = 1.15
"""A slow one is fast again below so many times that."""

MIN_DIFFERENCE_S = 0.03
"""Seconds a step that are worth a word: below that a busy machine's noise looks like slowness."""

_CONSECUTIVE_STEPS = 10  # judgements in a row that agree before anything is said


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
class _WorkerSamples:
    """One worker's last steps.

    Attributes:
        typical_s: the median of `compute_s`, once there are enough.
        against: judgements in a row that say otherwise than `slow`.
    """

    compute_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    samples_per_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    median_s: float | None = None
    slow: bool = False
    contrary_steps: int = 0


class SpeedTracker:
    """Collects the compute seconds of every worker's steps. Knows no clock.

    Compute time is a step's time less the time in which the worker stood waiting for others:
    `step_s - exposed_comm_s`.
    """

    def __init__(self) -> None:
        self._workers: dict[int, _WorkerSamples] = {}
        self._sorted_medians_s: list[float] = []
        """Every worker's that has one, in order: thousands of workers ask for medians of it."""

    def start_generation(self, workers: Sequence[int]) -> None:
        """A generation of these workers begins. Those who stay are still known; the split of the
        samples may be another one now, so times are measured anew."""
        self._workers = {
            worker: self._workers.get(worker) or _WorkerSamples() for worker in workers
        }
        self._sorted_medians_s.clear()
        for record in self._workers.values():
            record.compute_s.clear()
            record.median_s = None

    def add_step(self, worker: int, compute_s: float, samples: float) -> SpeedChange | None:
        """A worker finished a step with so many samples; what is to be said about it.

        A step that took no time is left out: it was not measured.
        """
        record = self._workers.setdefault(worker, _WorkerSamples())
        if compute_s <= 0:
            return None
        record.compute_s.append(compute_s)
        if samples > 0:
            record.samples_per_s.append(samples / compute_s)
        if len(record.compute_s) < WINDOW_STEPS:
            return None
        if record.median_s is not None:
            del self._sorted_medians_s[bisect_left(self._sorted_medians_s, record.median_s)]
        others_s = _median_of_sorted(self._sorted_medians_s)
        record.median_s = median(record.compute_s)
        insort(self._sorted_medians_s, record.median_s)
        if others_s is None:
            return None
        return self._detect_change(worker, record, record.median_s, others_s)

    def samples_per_s(self, workers: Sequence[int]) -> tuple[float | None, ...]:
        """Measured samples per compute second; None for a worker with too few steps."""
        found: list[float | None] = []
        for worker in workers:
            record = self._workers.get(worker)
            known = record is not None and len(record.samples_per_s) >= _CONSECUTIVE_STEPS
            found.append(median(record.samples_per_s) if record is not None and known else None)
        return tuple(found)

    def _detect_change(
        self, worker: int, record: _WorkerSamples, compute_s: float, others_s: float
    ) -> SpeedChange | None:
        limit = RECOVERED_RATIO if record.slow else SLOW_RATIO
        slow = compute_s > limit * others_s and compute_s - others_s > MIN_DIFFERENCE_S
        record.contrary_steps = record.contrary_steps + 1 if slow != record.slow else 0
        if record.contrary_steps < _CONSECUTIVE_STEPS:
            return None
        record.slow, record.contrary_steps = slow, 0
        return SpeedChange(worker, slow, compute_s, others_s)


def _median_of_sorted(ordered: Sequence[float]) -> float | None:
    middle = len(ordered) // 2
    if not ordered:
        return None
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


MIN_SHARE, MAX_SHARE = 0.25, 2.0
"""Bounds of a share, in even shares: a measurement may be wrong, and memory is limited."""

MIN_GAIN = 0.05
"""The part of a step's compute time that other shares must save, or things stay as they are."""

_BISECTIONS = 60  # more than a float has bits


def balance_shares(
    samples_per_s: Sequence[float | None], current: Sequence[float] = ()
) -> tuple[float, ...]:
    """Each rank's share of a step's samples in the next generation; empty for even shares.

    Args:
        samples_per_s: each rank's measured speed, a median over steps; None where it is not known:
            such a rank counts as one in the middle.
        current: the shares that these ranks have now; empty for even shares, and for other ranks
            than before.
    """
    ranks = len(samples_per_s)
    known = [speed for speed in samples_per_s if speed]
    if not known:
        return tuple(current)
    speeds = [speed or median(known) for speed in samples_per_s]
    now = current or [1 / ranks] * ranks
    best = _clamped_shares(speeds, MIN_SHARE / ranks, MAX_SHARE / ranks)
    gains = _slowest_rank_s(best, speeds) < _slowest_rank_s(now, speeds) * (1 - MIN_GAIN)
    return tuple(best) if gains else tuple(current)


def _slowest_rank_s(shares: Sequence[float], speeds: Sequence[float]) -> float:
    """The slowest rank's compute time, in steps of one sample."""
    return max(share / speed for share, speed in zip(shares, speeds, strict=True))


def _clamped_shares(weights: Sequence[float], least: float, most: float) -> list[float]:
    """Shares in proportion to `weights` where the bounds allow it, adding up to 1.

    The sum of the clamped products grows with the factor, so halving finds the one that gives 1.
    """
    low, high = 0.0, 1 / min(weights)  # with `high` every share is at its upper bound
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        total = sum(min(most, max(least, middle * weight)) for weight in weights)
        low, high = (middle, high) if total < 1 else (low, middle)
    shares = [min(most, max(least, high * weight)) for weight in weights]
    return [share / sum(shares) for share in shares]
