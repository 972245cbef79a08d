"""Amounts of data that a job's ranks read of their streams, by source. No clock, no I/O."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from rayzero.orchestrator.metrics.role_table import one
from rayzero.orchestrator.progress import SMOOTHING, StepRecord
from rayzero.workers.spread import Spread

MAX_SOURCES = 100
"""Maximum number of sources with metrics. Bounds the number of Prometheus series."""
_PREFIX = "streams/"


@dataclass
class SourceValues:
    """The values of one source, summed over all ranks.

    Args:
        totals: `samples` in finished steps; `blocks` that were read, and their `bytes` in memory;
            how often a batch took rows of a block in memory (`hits`) or waited for it (`waits`).
        share: share of the source in the samples of the newest step.
        per_s: samples and bytes per second in recent steps.
    """

    totals: Counter[str] = field(default_factory=Counter)
    share: float = 0.0
    per_s: dict[str, float] = field(default_factory=dict)

    @property
    def hit_ratio(self) -> float | None:
        uses = self.totals["hits"] + self.totals["waits"]
        return self.totals["hits"] / uses if uses else None


class StreamTable:
    """The sources of a job's streams, by name. A job without streams has none."""

    def __init__(self) -> None:
        self.by_source: dict[str, SourceValues] = {}
        # Moving averages over recent steps: the duration, and the amount of each source and kind.
        self._step_s = 0.0
        self._amounts: defaultdict[tuple[str, str], float] = defaultdict(float)

    def add_step(self, record: StepRecord) -> dict[str, Spread]:
        """Adds a finished step. Returns the values of the curves at this step, by curve name."""
        counts: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for name, number in record.gauges.items():
            if name.startswith(_PREFIX):
                source, _, kind = name.removeprefix(_PREFIX).rpartition("/")
                counts[source][kind] = number
        for source in counts:
            if len(self.by_source) < MAX_SOURCES:
                self.by_source.setdefault(source, SourceValues())
        samples = sum(kinds.get("samples", 0) for kinds in counts.values())
        weight = SMOOTHING if self._step_s else 1.0
        self._step_s += weight * (record.step_s - self._step_s)
        curves: dict[str, Spread] = {}
        for source, values in self.by_source.items():
            step = counts[source]
            values.totals.update({kind: int(number) for kind, number in step.items()})
            values.share = step.get("samples", 0) / samples if samples else 0.0
            for kind in ("samples", "bytes"):
                if kind not in values.totals:  # an iterable has no blocks
                    continue
                number, key = step.get(kind, 0.0), (source, kind)
                self._amounts[key] += weight * (number - self._amounts[key])
                if self._step_s > 0:  # blocks are read in bursts, so the curves are smoothed, too
                    values.per_s[kind] = self._amounts[key] / self._step_s
                    curves[f"{_PREFIX}{source}/{kind}_per_s"] = one(values.per_s[kind])
        return curves
