"""From the ranks' reports to one record a step, and to the totals of the job. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from rayzero.workers.messages import Report

_BYTES = "bytes/"
_WAITS = ("phases/data", "phases/mirror", "checkpoint_s")


@dataclass(frozen=True)
class StepRecord:
    """One step, over all ranks.

    Args:
        loss: the mean over ranks (an engine's loss is already global and the same on each).
        tokens: counted by all ranks since the last record: by the user, else by the engine.
        step_s: the slowest rank's time.
        gauges: the mean over ranks of everything else they reported.
        waits: seconds of the rank that did worst, for what peers have to wait for as well.
        at_s: when the last rank finished it, as Unix time on that rank's node.
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

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.step_s if self.tokens and self.step_s > 0 else None


class JobProgress:
    """Collects reports until a step is complete, which is when every rank has finished it."""

    def __init__(self) -> None:
        self.steps = 0
        """Finished steps in the state of the job: those it went back behind do not count."""
        self.done = 0
        """Steps finished by this run, those that were done again too."""
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self.tokens = 0.0
        self._first_step: StepRecord | None = None
        self._steady_tokens = 0.0
        self._steady_s = 0.0
        self.peak_bytes: dict[str, int] = {}
        self.world_sizes: list[int] = []
        """Every change of it."""
        self._generation = 0
        self._world_size = 0
        self._open: defaultdict[int, dict[int, Report]] = defaultdict(dict)

    @property
    def tokens_per_s(self) -> float | None:
        """Over all steps but each generation's first, which holds what happens once.

        Of a job with a single step, that step's.
        """
        if self._steady_tokens and self._steady_s > 0:
            return self._steady_tokens / self._steady_s
        return self._first_step.tokens_per_s if self._first_step else None

    def begin(self, generation: int, world_size: int, step: int = 0) -> list[StepRecord]:
        """A new generation begins at a finished step; what the old one left undone is forgotten.

        Returns:
            The steps up to there that some rank of the old one did not live to report: they were
            finished, and are told by what the others said.
        """
        late = [
            self._close(number, list(ranks.values()))
            for number, ranks in sorted(self._open.items())
            if self.steps < number <= step
        ]
        for ranks in self._open.values():
            self._note_peaks(_columns(list(ranks.values())))
        self._generation, self._world_size = generation, world_size
        if not self.world_sizes or self.world_sizes[-1] != world_size:
            self.world_sizes.append(world_size)
        self.steps = step
        self._first_step = None
        self._open.clear()
        return late

    def rewind(self, step: int) -> int:
        """Goes back to an earlier step; how many finished ones are to be done again."""
        redone = max(0, self.steps - step)
        self.steps = min(self.steps, step)
        return redone

    def add(self, report: Report) -> StepRecord | None:
        """The record of the step that this report completes, if it does."""
        if report.generation != self._generation:
            return None
        ranks = self._open[report.step]
        ranks[report.rank] = report
        if len(ranks) < self._world_size:
            return None
        del self._open[report.step]
        return self._close(report.step, list(ranks.values()))

    def count(self, counters: dict[str, float]) -> None:
        """Adds what a rank counted after its last step."""
        self.tokens += counters.get("tokens", 0.0)

    def peak(self, held: dict[str, int]) -> None:
        """Notes the bytes a rank holds, by class; the most of any rank stays."""
        for name, amount in held.items():
            self.peak_bytes[name] = max(self.peak_bytes.get(name, 0), amount)

    def _note_peaks(self, gauges: Mapping[str, Sequence[float]]) -> None:
        held = [name for name in gauges if name.startswith(_BYTES)]
        self.peak({name.removeprefix(_BYTES): int(max(gauges[name])) for name in held})

    def _close(self, step: int, reports: list[Report]) -> StepRecord:
        gauges = _columns(reports)
        self._note_peaks(gauges)
        means = {name: sum(values) / len(values) for name, values in gauges.items()}
        counted = sum(report.counters.get("tokens", 0.0) for report in reports)
        record = StepRecord(
            step=step,
            world_size=self._world_size,
            generation=self._generation,
            loss=means.pop("loss", None),
            tokens=counted or means.get("step_tokens", 0.0),
            step_s=max(gauges.get("step_s", [0.0])),
            gauges={name: value for name, value in means.items() if name != "step_s"},
            at_s=max(report.at_s for report in reports),
            waits={name: max(gauges[name]) for name in _WAITS if name in gauges},
        )
        self.steps = max(self.steps, step)
        self.done += 1
        self.tokens += record.tokens
        if self._first_step is None:
            self._first_step = record
        else:
            self._steady_tokens += record.tokens
            self._steady_s += record.step_s
        if record.loss is not None:
            self.first_loss = record.loss if self.first_loss is None else self.first_loss
            self.last_loss = record.loss
        return record


def _columns(reports: Sequence[Report]) -> dict[str, Sequence[float]]:
    """What the ranks reported, by name. Mostly all of them report the same, in the same order."""
    rows = [report.gauges for report in reports]
    names = list(rows[0]) if rows else []
    if all(list(row) == names for row in rows):
        return dict(zip(names, zip(*(row.values() for row in rows), strict=True), strict=True))
    every = dict.fromkeys(chain.from_iterable(rows))
    return {name: [row[name] for row in rows if name in row] for name in every}
