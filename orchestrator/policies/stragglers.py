"""Straggler policy: measures the speed of workers, and detects steadily slow ones. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median

WINDOW_STEPS = 20
"""Number of steps in a median."""

SLOW_RATIO = 1.3
"""A worker is slow if its compute time exceeds the others' median by this factor."""

RECOVERED_RATIO = 1.15
"""A slow worker counts as recovered below this factor."""

MIN_DIFFERENCE_S = 0.03
"""Smallest difference per step that counts: less is noise on a busy machine."""

_LOOK_STEPS = 5  # between two comparisons with the others: a median of 20 steps changes slowly
_CONSECUTIVE_LOOKS = 3  # comparisons in a row that must agree before a change is reported
_LEAST_STEPS = 10  # for a speed


class _WorkerSamples:
    def __init__(self) -> None:
        self.compute_s: deque[float] = deque(maxlen=WINDOW_STEPS)
        self.shares_per_s: deque[float] = deque(maxlen=WINDOW_STEPS)
        self.median_s: float | None = None
        """The median of `compute_s`, once there are enough steps."""
        self.steps = 0
        self.turn = 0
        """The last turn in which the worker was compared."""
        self.slow = False
        self.contrary_looks = 0
        """Number of comparisons in a row that contradict `slow`."""

    def changes_after(self, compute_s: float, others_s: float) -> bool:
        limit = RECOVERED_RATIO if self.slow else SLOW_RATIO
        slow = compute_s > limit * others_s and compute_s - others_s > MIN_DIFFERENCE_S
        self.contrary_looks = self.contrary_looks + 1 if slow != self.slow else 0
        if self.contrary_looks < _CONSECUTIVE_LOOKS:
            return False
        self.slow, self.contrary_looks = slow, 0
        return True


class SpeedTracker:
    """Measures the workers' speed: finds slow ones."""

    def __init__(self) -> None:
        self._workers: defaultdict[int, _WorkerSamples] = defaultdict(_WorkerSamples)
        self._turn = 0
        self._medians_s: list[float] = []
        """The medians of all workers when the turn began, in order. A turn ends when a worker is
        compared for the second time, so the medians of thousands of workers are sorted only once in
        `_LOOK_STEPS` steps."""

    def start_generation(self, members: tuple[int, ...]) -> None:
        """Begins a generation of these workers, by rank. Workers that stay keep their state, but
        times are measured anew because the split of the samples may have changed."""
        for worker in self._workers.keys() - set(members):
            del self._workers[worker]
        for record in self._workers.values():
            record.compute_s.clear()
            record.median_s = None
        self._begin_turn()

    def add_step(self, worker: int, compute_s: float) -> str:
        """Adds a step that a worker of this generation finished. `compute_s` is the time that the
        worker takes for an even share. Returns a message if the worker became steadily slow, or
        fast again, else "".

        A step without a compute time was not measured, and is skipped.
        """
        record = self._workers[worker]
        if compute_s <= 0:
            return ""
        record.compute_s.append(compute_s)
        record.shares_per_s.append(1 / compute_s)
        record.steps += 1
        if record.steps % _LOOK_STEPS or len(record.compute_s) < WINDOW_STEPS:
            return ""
        if record.turn == self._turn:
            self._begin_turn()
        record.turn = self._turn
        others_s = _median_without(self._medians_s, record.median_s)
        record.median_s = median(record.compute_s)
        if others_s is None or not record.changes_after(record.median_s, others_s):
            return ""
        times = f"{record.median_s:.3f} s per step, the others {others_s:.3f} s"
        if not record.slow:
            return f"worker {worker} is no longer slow: {times}"
        ratio = record.median_s / others_s
        return f"worker {worker} is {ratio:.1f} times slower than the others: {times}"

    def _begin_turn(self) -> None:
        self._turn += 1
        medians_s = (record.median_s for record in self._workers.values())
        self._medians_s = sorted(median_s for median_s in medians_s if median_s is not None)

    def shares_per_s(self, workers: Sequence[int]) -> tuple[float | None, ...]:
        """Returns how many even shares of a step each worker computes per second; None for a worker
        with too few steps."""
        records = (self._workers.get(worker) for worker in workers)
        return tuple(
            median(record.shares_per_s)
            if record is not None and len(record.shares_per_s) >= _LEAST_STEPS
            else None
            for record in records
        )


def _median_without(ordered: Sequence[float], own: float | None) -> float | None:
    """Returns the median of sorted numbers, without one of them, `own`; None if no other is
    left."""
    count = len(ordered) - (own is not None)
    if count == 0:
        return None
    skipped = count if own is None else bisect_left(ordered, own)
    low, high = (count - 1) // 2, count // 2  # indices without `own`
    return (ordered[low + (low >= skipped)] + ordered[high + (high >= skipped)]) / 2
