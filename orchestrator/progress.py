"""Aggregates the ranks' step reports to one record per step, and to the job's totals. Pure."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rayzero.workers.step_rows import StepRows

SMOOTHING = 0.1
"""Weight of the newest step in the moving average of step durations."""
FOLD_ROWS = 256
"""Number of rows that are aggregated at once, so that the last row of a step is as cheap as any
other."""


class RowAggregator:
    """Sums of named numbers, and extremes of some of them, at about a microsecond per row. Rows are
    collected, and every `FOLD_ROWS` rows are aggregated by columns, in C.

    Args:
        has_extremes: returns whether the extremes of a name are wanted.
    """

    def __init__(self, has_extremes: Callable[[str], bool] = lambda name: True) -> None:
        self._has_extremes = has_extremes
        self._rows = 0
        self._numbers: defaultdict[tuple[str, ...], array[float]]
        self._numbers = defaultdict(lambda: array("d"))
        """The numbers of the rows that are not aggregated yet, by the rows' names."""
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._maxima: dict[str, float] = {}
        self._minima: dict[str, float] = {}

    def add_rows(self, names: tuple[str, ...], numbers: Sequence[float]) -> None:
        """Adds rows that have the same names.

        Args:
            numbers: the numbers of the first row, of the second one, ...
        """
        self._numbers[names].extend(numbers)
        self._rows += len(numbers) // max(1, len(names))
        if self._rows >= FOLD_ROWS:
            self._fold()

    def maxima(self) -> Mapping[str, float]:
        """Returns the largest value of each name that has extremes."""
        self._fold()
        return self._maxima

    def minima(self, rows: int) -> dict[str, float]:
        """Returns the smallest value of each name that has extremes and is in exactly `rows`
        rows."""
        self._fold()
        return {name: low for name, low in self._minima.items() if self._counts[name] == rows}

    def means(self) -> dict[str, float]:
        """Returns the mean of each name, over the rows that have it."""
        self._fold()
        return {name: total / self._counts[name] for name, total in self._sums.items()}

    def _fold(self) -> None:
        for names, numbers in self._numbers.items():
            for index, name in enumerate(names):
                column = numbers[index :: len(names)]
                self._counts[name] += len(column)
                self._sums[name] += sum(column)
                if self._has_extremes(name):
                    self._maxima[name] = max(self._maxima.get(name, column[0]), max(column))
                    self._minima[name] = min(self._minima.get(name, column[0]), min(column))
        self._numbers.clear()
        self._rows = 0


_BYTES_PREFIX = "bytes/"
_WAIT_GAUGES = ("phases/data", "phases/mirror", "checkpoint_s")
_EXTREMES = frozenset(("step_s", "replica_step", *_WAIT_GAUGES))

BUILTIN_GAUGES = frozenset(
    (
        "step step_s samples step_samples step_tokens tokens_per_s lr grad_norm loss_scale mfu "
        "flops_per_s skipped skipped_steps bad_samples exposed_comm_s checkpoint_s replica_step "
        "replica_bytes replicated_step replicated_bytes resident_bytes device_peak_bytes cpu_cores "
        "gpu_utilization"
    ).split()
)
"""Names that engines and workers report."""
_BUILTIN_PREFIXES = ("phases/", _BYTES_PREFIX, "collectives/", "streams/")


@dataclass(frozen=True)
class StepRecord:
    """One step, aggregated over all ranks.

    Args:
        loss: the mean over ranks (an engine's loss is already global and the same on each).
        tokens: counted by all ranks since the last record: by the user, else by the engine.
        step_s: the slowest rank's time.
        gauges: the mean over ranks of all other reported values; for `streams/` the sum.
        waits: seconds of the slowest rank, for phases that its peers have to wait for.
        at_s: when the last rank finished it, as Unix time on that rank's node.
        mirrored_step: the newest step that every rank has mirrored to its node's vault; None if
            some rank has mirrored none.
        mirrored_bytes: total size of these mirrors.
    """

    step: int
    world_size: int
    generation: int
    loss: float | None
    tokens: float
    step_s: float
    gauges: dict[str, float]
    at_s: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)
    mirrored_step: int | None = None
    mirrored_bytes: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.step_s if self.tokens and self.step_s > 0 else None

    @property
    def samples_per_s(self) -> float | None:
        """None without an engine, which knows the batch size."""
        samples = self.gauges.get("step_samples", 0.0)
        return samples / self.step_s if samples and self.step_s > 0 else None

    def user_gauges(self) -> Iterator[tuple[str, float]]:
        """Yields the values that only the training function reports, not the engine or a worker."""
        for name, value in self.gauges.items():
            if name not in BUILTIN_GAUGES and not name.startswith(_BUILTIN_PREFIXES):
                yield name, value


class _OpenStep:
    """A step that some ranks have finished."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.counters: defaultdict[str, float] = defaultdict(float)
        self.at_s = 0.0
        self.gauges = RowAggregator(
            lambda name: name in _EXTREMES or name.startswith(_BYTES_PREFIX)
        )

    def add(self, rows: StepRows) -> int:
        """Adds reports; each rank counts once. Returns the number of ranks that have finished the
        step."""
        numbers: Sequence[float] = rows.numbers
        counters, width = rows.counters, len(rows.positions)
        if not self.ranks.isdisjoint(rows.ranks):
            new = [row for row, rank in enumerate(rows.ranks) if rank not in self.ranks]
            numbers = [
                number for row in new for number in rows.numbers[row * width : (row + 1) * width]
            ]
            counters = tuple(counters[row] for row in new)
        self.ranks.update(rows.ranks)
        for rank_counters in counters:
            for name, number in rank_counters.items():
                self.counters[name] += number
        self.at_s = max(self.at_s, *rows.at_s)
        self.gauges.add_rows(rows.names, numbers)
        return len(self.ranks)


class JobProgress:
    """Collects reports until a step is complete, that is, finished by every rank."""

    def __init__(self) -> None:
        self.steps = 0
        """Finished steps that the job's state contains: steps lost by a recovery do not count."""
        self.steps_executed = 0
        """Steps finished by this run, including redone ones."""
        self.steps_skipped = 0
        """Executed steps that changed nothing, because their gradient was not finite."""
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self._first_step: StepRecord | None = None
        self._steady_tokens = 0.0
        self._steady_s = 0.0
        self.peak_bytes: dict[str, int] = {}
        self.world_sizes: list[int] = []
        """The world size of each generation; successive equal sizes count once."""
        self._generation = 0
        self._world_size = 0
        self._reported = 0
        self._open_steps: defaultdict[int, _OpenStep] = defaultdict(_OpenStep)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second over all steps but each generation's first, which includes one-time
        work; over the first step if there is no other."""
        if self._steady_tokens and self._steady_s > 0:
            return self._steady_tokens / self._steady_s
        return self._first_step.tokens_per_s if self._first_step else None

    def start_generation(self, generation: int, world_size: int, step: int = 0) -> list[StepRecord]:
        """Starts a generation after a finished step, and drops incomplete later steps. Returns the
        records of finished steps that a lost rank did not report, from its peers' reports."""
        late = [
            self._complete_step(number, self._open_steps.pop(number))
            for number in sorted(self._open_steps)
            if self.steps < number <= step
        ]
        for incomplete in self._open_steps.values():
            self._update_byte_peaks(incomplete.gauges.maxima())
        self._generation, self._world_size = generation, world_size
        if not self.world_sizes or self.world_sizes[-1] != world_size:
            self.world_sizes.append(world_size)
        self.steps = step
        self._reported = 0
        self._first_step = None
        self._open_steps.clear()
        return late

    def continue_generation(self, number: int, world_size: int, reported: int, step: int) -> None:
        """Continues a lost controller's generation. That controller has reported `reported` steps,
        and all ranks have finished `step`."""
        self.start_generation(number, world_size, step)
        self.steps_executed, self._reported = step, reported

    def rewind(self, step: int) -> int:
        """Goes back to an earlier step. Returns the number of finished steps to redo."""
        redone = max(0, self.steps - step)
        self.steps = min(self.steps, step)
        return redone

    def add_rows(self, rows: StepRows) -> StepRecord | None:
        """Returns the record of the step that these reports complete, if any."""
        if rows.generation != self._generation or rows.step <= self._reported:
            return None
        if self._open_steps[rows.step].add(rows) < self._world_size:
            return None
        return self._complete_step(rows.step, self._open_steps.pop(rows.step))

    def update_peaks(self, held: dict[str, int]) -> None:
        """Updates the peak memory per class, over ranks and time."""
        for name, amount in held.items():
            self.peak_bytes[name] = max(self.peak_bytes.get(name, 0), amount)

    def _update_byte_peaks(self, maxima: Mapping[str, float]) -> None:
        held = [name for name in maxima if name.startswith(_BYTES_PREFIX)]
        self.update_peaks({name.removeprefix(_BYTES_PREFIX): int(maxima[name]) for name in held})

    def _complete_step(self, step: int, done: _OpenStep) -> StepRecord:
        """Returns the record of a step. Costs as much as one report, however many ranks there
        are."""
        maxima, means = done.gauges.maxima(), done.gauges.means()
        self._update_byte_peaks(maxima)
        mirrored = done.gauges.minima(self._world_size).get("replica_step")
        for name in ("step_s", "rank_loss"):  # of single ranks only
            means.pop(name, None)
        tokens = done.counters.pop("tokens", 0.0)
        record = StepRecord(
            step=step,
            world_size=self._world_size,
            generation=self._generation,
            loss=means.pop("loss", None),
            tokens=tokens or means.get("step_tokens", 0.0),
            step_s=maxima.get("step_s", 0.0),
            gauges={**means, **done.counters},
            at_s=done.at_s,
            waits={name: maxima[name] for name in _WAIT_GAUGES if name in maxima},
            mirrored_step=None if mirrored is None else int(mirrored),
            mirrored_bytes=means.get("replica_bytes", 0.0) * len(done.ranks),
        )
        self.steps = max(self.steps, step)
        self.steps_executed += 1
        self.steps_skipped += record.gauges.get("skipped", 0.0) > 0
        if self._first_step is None:
            self._first_step = record
        else:
            self._steady_tokens += record.tokens
            self._steady_s += record.step_s
        if record.loss is not None:
            self.first_loss = record.loss if self.first_loss is None else self.first_loss
            self.last_loss = record.loss
        return record


class StepPace:
    """A moving average of step durations. A generation's first step includes one-time work and the
    wait for its workers, so it counts only while no other step is known."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._generation = 0
        self._is_steady = False

    def add(self, record: StepRecord) -> None:
        is_first = record.generation != self._generation
        self._generation = record.generation
        if is_first and self._is_steady:
            return
        weight = SMOOTHING if self._is_steady else 1.0
        self.step_s += weight * (record.step_s - self.step_s)
        self._is_steady = not is_first

    def remaining_s(self, step: int, target: int | None) -> float | None:
        """Returns the time to the target step; None if the target or the pace is unknown."""
        return None if target is None or not self.step_s else max(0, target - step) * self.step_s
