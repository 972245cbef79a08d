"""What the finished steps say. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from math import isfinite

from rayzero.orchestrator.metrics.histogram import Histogram
from rayzero.orchestrator.metrics.own import Own
from rayzero.orchestrator.metrics.series import STEP_BUCKETS_S
from rayzero.orchestrator.progress import StepRecord

_PHASE = "phases/"
_SMOOTH = 0.1

_Histogram = partial(Histogram, STEP_BUCKETS_S)

PHASES = ("data", "forward", "backward", "reduce", "update", "publish", "mirror", "other")
"""What an engine's steps are made of."""


@dataclass
class Steps:
    """Totals are this run's: steps that were done again count again. One that was finished, but
    that no rank lived to report, counts as the next one does.

    Args:
        step: the last finished step in the job's state.
        last: the newest record; None before the first step.
        pace_s: what a step takes, of late.
    """

    step: int = 0
    done: int = 0
    last: StepRecord | None = None
    last_at_unix_s: float | None = None
    pace_s: float = 0.0
    tokens: float = 0.0
    samples: float = 0.0
    skipped: float = 0.0
    nonfinite: int = 0
    own: Own = field(default_factory=Own)
    whole: Histogram = field(default_factory=_Histogram)
    phases: dict[str, Histogram] = field(
        default_factory=lambda: {phase: _Histogram() for phase in PHASES}
    )

    def add(self, record: StepRecord, unix_s: float) -> None:
        gauges = record.gauges
        count = max(1, record.step - self.step) if self.last is not None else 1
        self.step, self.last = record.step, record
        self.done += count
        self.last_at_unix_s = unix_s
        smooth = _SMOOTH if self.pace_s else 1.0
        self.pace_s += smooth * (record.step_s - self.pace_s)
        self.tokens += record.tokens * count
        self.samples += gauges.get("step_samples", 0.0) * count
        self.skipped += gauges.get("skipped", 0.0)
        self.nonfinite += record.loss is not None and not isfinite(record.loss)
        self.own.add(record)
        self.whole.add(record.step_s)
        for name, seconds in gauges.items():
            if name.startswith(_PHASE):
                phase = name.removeprefix(_PHASE)
                self.phases.setdefault(phase, _Histogram()).add(seconds)

    def remaining_s(self, target: int | None) -> float | None:
        """How long the rest takes if all goes as of late; None when nobody knows."""
        if target is None or self.last is None:
            return None
        return max(0, target - self.step) * self.pace_s
