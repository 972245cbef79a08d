"""Straggler policy: detects steadily slow workers, and splits samples by measured speed. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median

from rayzero.workers.messages import StepReport

WINDOW_STEPS = 20
"""Number of steps in a median."""

SLOW_RATIO = 1.3
"""A worker is slow if its compute time exceeds the others' median by this factor."""

RECOVERED_RATIO = 1.15
"""A slow worker counts as recovered below this factor."""

MIN_DIFFERENCE_S = 0.03
"""Smallest difference per step that counts: less is noise on a busy machine."""

_CONSECUTIVE_STEPS = 10  # steps in a row that must agree before a change is reported


class _WorkerSamples:
    def __init__(self) -> None:
        self.compute_s: deque[float] = deque(maxlen=WINDOW_STEPS)
        self.samples_per_s: deque[float] = deque(maxlen=WINDOW_STEPS)
        self.median_s: float | None = None
        """Of `compute_s`, once there are enough steps."""
        self.slow = False
        self.contrary_steps = 0
        """Number of steps in a row that contradict `slow`."""

    def changes_after(self, compute_s: float, others_s: float) -> bool:
        limit = RECOVERED_RATIO if self.slow else SLOW_RATIO
        slow = compute_s > limit * others_s and compute_s - others_s > MIN_DIFFERENCE_S
        self.contrary_steps = self.contrary_steps + 1 if slow != self.slow else 0
        if self.contrary_steps < _CONSECUTIVE_STEPS:
            return False
        self.slow, self.contrary_steps = slow, 0
        return True


class SpeedTracker:
    """Measures the workers' speed: finds slow ones, and balances the next generation's samples.

    Args:
        balance: whether to split samples by speed (`recovery.balance: auto`).
    """

    def __init__(self, *, balance: bool = False) -> None:
        self._balance = balance
        self._members: tuple[int, ...] = ()
        self._shares: tuple[float, ...] = ()
        self._workers: defaultdict[int, _WorkerSamples] = defaultdict(_WorkerSamples)
        self._sorted_medians_s: list[float] = []
        """The medians of all workers that have one, kept sorted: thousands of workers read them."""

    def start_generation(self, members: tuple[int, ...]) -> tuple[float, ...]:
        """A generation of these workers, by rank, begins. Workers that stay keep their state, but
        times are measured anew because the split of the samples may have changed.

        Returns:
            Each rank's share of a step's samples; empty for even shares.
        """
        current = self._shares if members == self._members else ()
        self._members, self._shares = members, ()
        if self._balance:
            self._shares = balance_shares(self.samples_per_s(members), current)
        for worker in self._workers.keys() - set(members):
            del self._workers[worker]
        self._sorted_medians_s.clear()
        for record in self._workers.values():
            record.compute_s.clear()
            record.median_s = None
        return self._shares

    def add_report(self, worker: int, report: StepReport) -> str:
        """A worker of this generation finished a step. Returns a message as `add_step`."""
        gauges = report.gauges
        if "exposed_comm_s" not in gauges:
            return ""  # the job has no engine that measures
        # Compute time is without the time that the worker waited for others. Only ratios count, and
        # the global batch is constant: shares work as well as samples.
        compute_s = gauges["step_s"] - gauges["exposed_comm_s"]
        share = self._shares[report.rank] if self._shares else 1 / len(self._members)
        return self.add_step(worker, compute_s, share)

    def add_step(self, worker: int, compute_s: float, samples: float) -> str:
        """A worker finished a step with that many samples. Returns a message if it became steadily
        slow, or fast again, else "".

        A step without a compute time was not measured, and is skipped.
        """
        record = self._workers[worker]
        if compute_s <= 0:
            return ""
        record.compute_s.append(compute_s)
        if samples > 0:
            record.samples_per_s.append(samples / compute_s)
        if len(record.compute_s) < WINDOW_STEPS:
            return ""
        if record.median_s is not None:
            del self._sorted_medians_s[bisect_left(self._sorted_medians_s, record.median_s)]
        others_s = _median_of_sorted(self._sorted_medians_s)
        record.median_s = median(record.compute_s)
        insort(self._sorted_medians_s, record.median_s)
        if others_s is None or not record.changes_after(record.median_s, others_s):
            return ""
        times = f"{record.median_s:.3f} s per step, the others {others_s:.3f} s"
        if not record.slow:
            return f"worker {worker} is no longer slow: {times}"
        ratio = record.median_s / others_s
        return f"worker {worker} is {ratio:.1f} times slower than the others: {times}"

    def samples_per_s(self, workers: Sequence[int]) -> tuple[float | None, ...]:
        """Measured samples per compute second; None for a worker with too few steps."""
        records = (self._workers.get(worker) for worker in workers)
        return tuple(
            median(record.samples_per_s)
            if record is not None and len(record.samples_per_s) >= _CONSECUTIVE_STEPS
            else None
            for record in records
        )


def _median_of_sorted(ordered: Sequence[float]) -> float | None:
    middle = len(ordered) // 2
    if not ordered:
        return None
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


MIN_SHARE, MAX_SHARE = 0.25, 2.0
"""Bounds of a share, relative to an even share: measurements can be wrong, memory is limited."""

MIN_GAIN = 0.05
"""Fraction of a step's compute time that new shares must save to replace the current ones."""

_BISECTIONS = 60  # more than a float has bits


def balance_shares(
    samples_per_s: Sequence[float | None], current: Sequence[float] = ()
) -> tuple[float, ...]:
    """Each rank's share of a step's samples in the next generation; empty for even shares.

    Args:
        samples_per_s: each rank's measured speed, a median over steps; None if it is unknown, which
            counts as the median speed.
        current: the shares that these ranks have now; empty for even shares, or if the ranks
            changed.
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
    return max(share / speed for share, speed in zip(shares, speeds, strict=True))


def _clamped_shares(weights: Sequence[float], min_share: float, max_share: float) -> list[float]:
    """Shares proportional to `weights` within the bounds, with sum 1.

    The sum of the clamped products grows with the factor, so bisection finds the factor.
    """
    low, high = 0.0, 1 / min(weights)  # with `high` every share is at its upper bound
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        total = sum(min(max_share, max(min_share, middle * weight)) for weight in weights)
        low, high = (middle, high) if total < 1 else (low, middle)
    shares = [min(max_share, max(min_share, high * weight)) for weight in weights]
    return [share / sum(shares) for share in shares]
