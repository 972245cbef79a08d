"""The metrics of one job: its facts, and what only its process counts of its events. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from rayzero.orchestrator import job_events
from rayzero.orchestrator.facts import JobFacts
from rayzero.orchestrator.metrics.components import (
    STEP_BUCKETS_S,
    CheckpointMetrics,
    Histogram,
    RecoveryTimes,
    ReplicaMetrics,
)
from rayzero.orchestrator.metrics.curves import CurveSet
from rayzero.orchestrator.metrics.goodput import TimeAccounting, TimeBreakdown, TimeCategory
from rayzero.orchestrator.metrics.rank_metrics import RankMetricsTable
from rayzero.orchestrator.policies.failure import (
    HARDWARE_CAUSES,
    FaultBudget,
    FaultCause,
    faults_in_budget,
)
from rayzero.orchestrator.progress import StepPace, StepRecord
from rayzero.orchestrator.spec import JobSpec

_PHASE_PREFIX = "phases/"
_StepHistogram = partial(Histogram, STEP_BUCKETS_S)

STEP_PHASES = ("data", "forward", "backward", "reduce", "update", "publish", "mirror", "other")
"""The phases of an engine's step."""

MAX_USER_METRICS = 100
"""Maximum number of user metric names of a job; bounds the number of Prometheus series."""


@dataclass
class StepSeries:
    """The steps of this process.

    Args:
        last_record: None before the first step.
        pace: the recent duration of a step.
        user_values: the last value under each name; a step need not report every name.
        user_values_dropped: under names beyond the first `MAX_USER_METRICS`.
    """

    last_record: StepRecord | None = None
    last_at_unix_s: float | None = None
    pace: StepPace = field(default_factory=StepPace)
    user_values: dict[str, float] = field(default_factory=dict)
    user_values_dropped: int = 0
    step_time: Histogram = field(default_factory=_StepHistogram)
    phase_times: dict[str, Histogram] = field(
        default_factory=lambda: {phase: _StepHistogram() for phase in STEP_PHASES}
    )

    def gauge(self, name: str) -> float | None:
        """The mean over ranks of a reported value, in the last step."""
        return self.last_record.gauges.get(name) if self.last_record is not None else None

    def add_step(self, record: StepRecord, unix_s: float) -> None:
        self.last_record, self.last_at_unix_s = record, unix_s
        self.pace.add(record)
        self.step_time.add(record.step_s)
        for name, seconds in record.gauges.items():
            if name.startswith(_PHASE_PREFIX):
                phase = name.removeprefix(_PHASE_PREFIX)
                self.phase_times.setdefault(phase, _StepHistogram()).add(seconds)
        for name, value in record.user_gauges():
            if name in self.user_values or len(self.user_values) < MAX_USER_METRICS:
                self.user_values[name] = value
            else:
                self.user_values_dropped += 1


@dataclass(frozen=True)
class Timestamps:
    """One moment on the controller's clock, whose origin is arbitrary, and as Unix time."""

    clock_s: float
    unix_s: float


class JobMetrics:
    """Counts a job's events. `stage` is the ZeRO stage, None without an engine config; `now`
    returns the current time; the counts of the run that `facts` are of continue."""

    def __init__(
        self, spec: JobSpec, stage: int | None, now: Callable[[], Timestamps], facts: JobFacts
    ) -> None:
        self.spec = spec
        self.stage = stage
        self.now = now
        self.facts = facts
        self.state_since = started = now()
        self.time_accounting = TimeAccounting(started.clock_s)
        self.steps = StepSeries()
        self.ranks = RankMetricsTable()
        self.recovery_times = RecoveryTimes()
        self.replicas = ReplicaMetrics()
        self.checkpoints = CheckpointMetrics(enabled=spec.checkpoint.every_steps is not None)
        self.curves = CurveSet()
        if facts.run:
            ago_s = max(0.0, started.unix_s - facts.began_at_s)
            self.time_accounting.restore(facts.counters.seconds, facts.best_step, ago_s)
        if facts.checkpoint_step is not None:
            self.checkpoints.set_newest(facts.checkpoint_step, facts.checkpoint_at_s)

    def on_event(self, event: job_events.JobEvent, facts: JobFacts) -> None:
        """`facts`: with this event."""
        now, self.facts = self.now(), facts
        match event:
            case job_events.GenerationStarted():
                self.ranks.start_generation(event.nodes)
            case job_events.ReplicationChanged():
                self.replicas.set_replication(event.enabled, now.unix_s)
            case job_events.StateEntered():
                self.time_accounting.on_state(event.state, now.clock_s)
                self.state_since = now
            case StepRecord():
                self._on_step(event, now)
            case job_events.Repaired():
                self.recovery_times.add(event)
                self.time_accounting.recovery_finished(event.seconds, now.clock_s)
            case job_events.Resized():
                self.time_accounting.recovery_finished(event.seconds, now.clock_s)
            case job_events.Resumed():
                if event.step != self.checkpoints.step:  # otherwise its time is known
                    self.checkpoints.set_newest(event.step, now.unix_s)
            case job_events.Checkpointed():
                self.checkpoints.on_committed(event, now.unix_s)
            case job_events.StepReplicated():
                self.replicas.on_replicated(event.step, event.nbytes, now.unix_s)

    @property
    def worker_limits(self) -> dict[str, int]:
        least, most = self.facts.scaled_limits or (self.spec.workers.min, self.spec.workers.most)
        return {"min": least, "max": most}

    @property
    def remaining_s(self) -> float | None:
        """Time to the last step at the recent step duration; None if either is unknown."""
        return self.steps.pace.remaining_s(self.facts.step, self.spec.steps)

    @property
    def faults_by_cause(self) -> dict[str, int]:
        """With that which ended the job."""
        facts, counts = self.facts, dict.fromkeys(map(str, FaultCause), 0)
        counts |= facts.faults_by_cause
        if facts.fatal is not None:
            counts[facts.fatal.cause] += 1
        return counts

    @property
    def faults_in_budget(self) -> int:
        """Hardware faults that count against the budget now."""
        facts, recovery = self.facts, self.spec.recovery
        budget = FaultBudget(recovery.max_faults, recovery.fault_window_s)
        faults = (*facts.faults, *([facts.fatal] if facts.fatal else ()))
        return len(faults_in_budget(faults, HARDWARE_CAUSES, budget, self.now().unix_s))

    def time_breakdown(self) -> TimeBreakdown:
        return self.time_accounting.breakdown_at(self.now().clock_s)

    def _on_step(self, record: StepRecord, now: Timestamps) -> None:
        checkpoint_s = record.waits.get("checkpoint_s", 0.0)
        waits_s = {
            TimeCategory.DATA: record.waits.get("phases/data", 0.0),
            TimeCategory.MIRROR: max(0.0, record.waits.get("phases/mirror", 0.0) - checkpoint_s),
            TimeCategory.CHECKPOINT: checkpoint_s,
        }
        self.time_accounting.on_step(record.step, record.step_s, waits_s, now.clock_s)
        self.steps.add_step(record, now.unix_s)
        self.curves.add_step(record, now.unix_s - self.facts.began_at_s)
        self.checkpoints.on_step(now.unix_s)
        if self.spec.recovery.replicas > 0:
            self.replicas.own_node.mark_pending(now.unix_s)
        if record.mirrored_step is not None:
            self.replicas.on_mirrored(record.mirrored_step, record.mirrored_bytes, now.unix_s)
