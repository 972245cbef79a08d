"""Curves of a job's values, step by step, in bounded memory. No clock, no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import inf, isfinite
from typing import Any

from rayzero.orchestrator.progress import StepRecord
from rayzero.workers.spread import Spread

MAX_BUCKETS = 512
"""Maximum number of buckets of the loss curve, and default of a `Curve`."""
MAX_SET_BUCKETS = 256
"""Maximum number of buckets of each other curve of a job."""
MAX_USER_CURVES = 40
"""Maximum number of curves of values that a job's functions report. Further names have no curve."""

_GAUGES = ("lr", "grad_norm", "loss_scale", "mfu", "exposed_comm_s")
_USAGE = ("resident_bytes", "device_peak_bytes", "cpu_cores", "gpu_utilization")
_PHASE_PREFIX, _USER_PREFIX = "phases/", "user/"
_FREE_PREFIXES = (_USER_PREFIX, "roles/", "rollouts/", "streams/")

Row = list[Any]
"""[first step, mean, minimum, maximum, number of inf and nan] of a bucket; [step, value] if the
bucket has a single number. Values are None if no step had a finite one."""


@dataclass(slots=True)
class _Bucket:
    """The values of consecutive steps."""

    first_step: int
    low: float = inf
    high: float = -inf
    total: float = 0.0
    finite: int = 0
    nonfinite: int = 0

    def add(self, value: float, low: float, high: float) -> None:
        if isfinite(value):
            self.low, self.high = min(self.low, low), max(self.high, high)
            self.total += value
            self.finite += 1
        else:
            self.nonfinite += 1

    def absorb(self, after: _Bucket) -> None:
        """Adds the values of the next bucket."""
        self.low, self.high = min(self.low, after.low), max(self.high, after.high)
        self.total += after.total
        self.finite += after.finite
        self.nonfinite += after.nonfinite

    @property
    def mean(self) -> float | None:
        return self.total / self.finite if self.finite else None


class Curve:
    """A value by step, in a bounded number of buckets. When there are too many, the number of steps
    in a bucket doubles. A bucket keeps extremes and counts nan, so no spike and no nan is lost."""

    def __init__(self, max_buckets: int = MAX_BUCKETS) -> None:
        self._max_buckets = max_buckets
        self._buckets: list[_Bucket] = []
        self._rows: list[Row] = []  # cached rows of the first buckets, which are complete
        self._stride = 1

    def add(self, step: int, value: float, spread: tuple[float, float] | None = None) -> None:
        """Adds the value of a step. If the step is done again, this removes the buckets that begin
        at this step or a later one. In a bucket that begins before the step, both values count.

        Args:
            spread: the least and the greatest number of which `value` is the mean.
        """
        buckets = self._buckets
        while buckets and buckets[-1].first_step >= step:
            buckets.pop()
        if not buckets or buckets[-1].first_step // self._stride != step // self._stride:
            buckets.append(_Bucket(step))
        buckets[-1].add(value, *(spread or (value, value)))
        del self._rows[len(buckets) - 1 :]
        while len(self._buckets) > self._max_buckets:
            self._stride *= 2
            self._buckets = list(self._merged())
            self._rows.clear()

    def restore(self, rows: Sequence[Row]) -> None:
        """Begins with the rows that `rows` has returned in an earlier process. Raises ValueError or
        TypeError if these are not valid rows."""
        ends = [row[0] for row in rows[1:]]
        for row, end in zip_longest(rows, ends):
            is_single = len(row) == 2
            if is_single:
                first, mean = row
                low = high = mean
                nonfinite = 0
            else:
                first, mean, low, high, nonfinite = row
            bucket = _Bucket(int(first), nonfinite=int(nonfinite))
            if mean is None:
                bucket.nonfinite = max(1, bucket.nonfinite)
            else:
                steps = 1 if end is None or is_single else int(end) - int(first)
                bucket.finite = max(1, steps - bucket.nonfinite)
                bucket.total = mean * bucket.finite
                bucket.low, bucket.high = float(low), float(high)
            self._buckets.append(bucket)

    def rows(self) -> list[Row]:
        complete = self._buckets[len(self._rows) : -1]
        self._rows += map(_row, complete)
        return [*self._rows, *map(_row, self._buckets[-1:])]

    def means(self) -> list[tuple[int, float | None]]:
        """Returns the first step and the mean of each bucket."""
        return [(bucket.first_step, bucket.mean) for bucket in self._buckets]

    def _merged(self) -> Iterator[_Bucket]:
        current: _Bucket | None = None
        for bucket in self._buckets:
            if current and current.first_step // self._stride == bucket.first_step // self._stride:
                current.absorb(bucket)
                continue
            if current:
                yield current
            current = bucket
        if current:
            yield current


class CurveSet:
    """The curves of a job by name: its loss, and values of the engines, the training function
    (`user/NAME`), the roles (`roles/ROLE/NAME`), the rollout buffer (`rollouts/NAME`) and the
    sources of streams (`streams/SOURCE/NAME`)."""

    def __init__(self) -> None:
        self.loss = Curve()
        self.dropped_names: set[str] = set()
        """Names of user values that have no curve, because there are too many. At most
        `MAX_USER_CURVES` names are kept."""
        self._others: dict[str, Curve] = {}
        self._user_curves = 0

    def add_step(self, record: StepRecord, elapsed_s: float) -> None:
        """Adds the values of a finished step. `elapsed_s` is the time from the beginning of the run
        to this step."""
        if record.loss is not None:
            self.loss.add(record.step, record.loss)
        self._add("elapsed_s", record.step, elapsed_s)
        self._add("step_s", record.step, record.step_s)
        if record.tokens_per_s is not None:
            self._add("tokens_per_s", record.step, record.tokens_per_s)
        if record.samples_per_s is not None:
            self._add("samples_per_s", record.step, record.samples_per_s)
        for name, value in record.gauges.items():
            if name in _GAUGES or name in _USAGE or name.startswith(_PHASE_PREFIX):
                self._add(name, record.step, value)
        for name, value in record.user_gauges():
            self._add_user(_USER_PREFIX + name, record.step, value)

    def add_spreads(self, step: int, values: Mapping[str, Spread]) -> None:
        """Adds the values of `RoleTable.take_step` or `StreamTable.add_step`."""
        for name, spread in values.items():
            self._add_user(name, step, spread.mean, (spread.low, spread.high))

    def rows(self) -> dict[str, list[Row]]:
        """Returns the rows of all curves that are not empty, by name, the loss first."""
        curves = {"loss": self.loss, **self._others}
        return {name: rows for name, curve in curves.items() if (rows := curve.rows())}

    def restore(self, rows: Mapping[str, Sequence[Row]]) -> None:
        """Replaces all curves by those of `rows`. Raises as `Curve.restore`."""
        restored = CurveSet()
        for name, curve_rows in rows.items():
            curve = restored.loss if name == "loss" else Curve(MAX_SET_BUCKETS)
            curve.restore(curve_rows)
            if name != "loss":
                restored._others[name] = curve
        self.loss, self._others = restored.loss, restored._others
        self._user_curves = sum(name.startswith(_FREE_PREFIXES) for name in self._others)

    def _add(
        self, name: str, step: int, value: float, spread: tuple[float, float] | None = None
    ) -> None:
        curve = self._others.get(name)
        if curve is None:
            curve = self._others[name] = Curve(MAX_SET_BUCKETS)
        curve.add(step, value, spread)

    def _add_user(
        self, name: str, step: int, value: float, spread: tuple[float, float] | None = None
    ) -> None:
        if name not in self._others:
            if self._user_curves >= MAX_USER_CURVES:
                if len(self.dropped_names) < MAX_USER_CURVES:
                    self.dropped_names.add(name.removeprefix(_USER_PREFIX))
                return
            self._user_curves += 1
        self._add(name, step, value, spread)


def _row(bucket: _Bucket) -> Row:
    mean = _short(bucket.mean)
    if bucket.finite + bucket.nonfinite == 1 and not bucket.low < bucket.high:
        return [bucket.first_step, mean]
    return [bucket.first_step, mean, _short(bucket.low), _short(bucket.high), bucket.nonfinite]


def _short(value: float | None) -> float | None:
    """Rounds to as many digits as a chart can show. Returns None for inf and nan, which JSON cannot
    represent."""
    return None if value is None or not isfinite(value) else float(f"{value:.7g}")
