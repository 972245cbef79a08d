"""From the ranks' reports to one record a step, and to the totals of the job. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from rayzero.orchestrator.columns import Columns
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
        mirrored_step: the newest step of which every rank's share lies in its node's vault; None
            while some rank's does not.
        mirrored_bytes: all that the ranks have there.
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


class _Open:
    """A step that some ranks have finished."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.tokens = 0.0
        self.at_s = 0.0
        self.gauges = Columns()

    def add(self, report: Report) -> int:
        """How many ranks have finished it now; each reports a step once."""
        if report.rank not in self.ranks:
            self.ranks.add(report.rank)
            if report.counters:
                self.tokens += report.counters.get("tokens", 0.0)
            self.at_s = max(self.at_s, report.at_s)
            self.gauges.add(report.gauges)
        return len(self.ranks)


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
        self._open: defaultdict[int, _Open] = defaultdict(_Open)

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
            self._close(number, self._open.pop(number))
            for number in sorted(self._open)
            if self.steps < number <= step
        ]
        for left in self._open.values():
            self._note_peaks(left.gauges.maxima())
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
        if self._open[report.step].add(report) < self._world_size:
            return None
        return self._close(report.step, self._open.pop(report.step))

    def count(self, counters: dict[str, float]) -> None:
        """Adds what a rank counted after its last step."""
        self.tokens += counters.get("tokens", 0.0)

    def peak(self, held: dict[str, int]) -> None:
        """Notes the bytes a rank holds, by class; the most of any rank stays."""
        for name, amount in held.items():
            self.peak_bytes[name] = max(self.peak_bytes.get(name, 0), amount)

    def _note_peaks(self, maxima: Mapping[str, float]) -> None:
        held = [name for name in maxima if name.startswith(_BYTES)]
        self.peak({name.removeprefix(_BYTES): int(maxima[name]) for name in held})

    def _close(self, step: int, done: _Open) -> StepRecord:
        """Costs what a report costs, however many ranks there are."""
        maxima, means = done.gauges.maxima(), done.gauges.means()
        self._note_peaks(maxima)
        mirrored = done.gauges.minima(self._world_size).get("replica_step")
        means.pop("step_s", None)
        record = StepRecord(
            step=step,
            world_size=self._world_size,
            generation=self._generation,
            loss=means.pop("loss", None),
            tokens=done.tokens or means.get("step_tokens", 0.0),
            step_s=maxima.get("step_s", 0.0),
            gauges=means,
            at_s=done.at_s,
            waits={name: maxima[name] for name in _WAITS if name in maxima},
            mirrored_step=None if mirrored is None else int(mirrored),
            mirrored_bytes=means.get("replica_bytes", 0.0) * len(done.ranks),
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
