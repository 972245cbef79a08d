"""All counts of one job, updated by its events. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import isfinite

from rayzero.orchestrator import job_events
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.metrics.components import (
    STEP_BUCKETS_S,
    CheckpointMetrics,
    FaultMetrics,
    Histogram,
    ReplicaMetrics,
)
from rayzero.orchestrator.metrics.goodput import TimeAccounting, TimeBreakdown, TimeCategory
from rayzero.orchestrator.metrics.history import DisplayHistory
from rayzero.orchestrator.metrics.rank_metrics import RankMetricsTable
from rayzero.orchestrator.policies.failure import FaultBudget
from rayzero.orchestrator.progress import StepPace, StepRecord
from rayzero.orchestrator.spec import JobSpec

_PHASE_PREFIX = "phases/"
_StepHistogram = partial(Histogram, STEP_BUCKETS_S)

STEP_PHASES = ("data", "forward", "backward", "reduce", "update", "publish", "mirror", "other")
"""The phases of an engine's step."""

MAX_USER_METRICS = 100
"""Maximum number of user metric names of a job; bounds the number of Prometheus series."""

JOURNALED_TOTALS = ("done", "tokens", "samples", "skipped", "nonfinite")
"""The fields of `StepTotals` that continue when another controller adopts the run."""


@dataclass
class StepTotals:
    """Totals of this run, in which recomputed steps count again. A step that finished but was never
    reported, because no rank survived, counts like the next one.

    Args:
        step: the last finished step.
        last_record: None before the first step.
        pace: the recent duration of a step.
        user_values: the last value under each name; a step need not report every name.
        user_values_dropped: under names beyond the first `MAX_USER_METRICS`.
    """

    step: int = 0
    done: int = 0
    last_record: StepRecord | None = None
    last_at_unix_s: float | None = None
    pace: StepPace = field(default_factory=StepPace)
    tokens: float = 0.0
    samples: float = 0.0
    skipped: float = 0.0
    nonfinite: int = 0
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
        gauges = record.gauges
        count = max(1, record.step - self.step) if self.last_record is not None else 1
        self.step, self.last_record = record.step, record
        self.done += count
        self.last_at_unix_s = unix_s
        self.pace.add(record)
        self.tokens += record.tokens * count
        self.samples += gauges.get("step_samples", 0.0) * count
        self.skipped += gauges.get("skipped", 0.0)
        self.nonfinite += record.loss is not None and not isfinite(record.loss)
        self.step_time.add(record.step_s)
        for name, seconds in gauges.items():
            if name.startswith(_PHASE_PREFIX):
                phase = name.removeprefix(_PHASE_PREFIX)
                self.phase_times.setdefault(phase, _StepHistogram()).add(seconds)
        for name, value in record.user_gauges():
            if name in self.user_values or len(self.user_values) < MAX_USER_METRICS:
                self.user_values[name] = value
            else:
                self.user_values_dropped += 1

    def remaining_s(self, target: int | None) -> float | None:
        """Time to the target step at the recent step duration; None if either is unknown."""
        return self.pace.remaining_s(self.step, target)


@dataclass(frozen=True)
class Timestamps:
    """One moment on the controller's clock, whose origin is arbitrary, and as Unix time."""

    clock_s: float
    unix_s: float


class JobMetrics:
    """Counts a job's events. `stage` is the ZeRO stage, None without an engine config; `now`
    returns the current time."""

    def __init__(self, spec: JobSpec, stage: int | None, now: Callable[[], Timestamps]) -> None:
        self.spec = spec
        self.stage = stage
        self.now = now
        self.started = self.state_since = now()
        self.state = State.PENDING
        self.generation = 0
        self.worker_limits = (spec.workers.min, spec.workers.most)
        self.time_accounting = TimeAccounting(self.started.clock_s)
        self.steps = StepTotals()
        self.ranks = RankMetricsTable()
        self.faults = FaultMetrics(
            FaultBudget(spec.recovery.max_faults, spec.recovery.fault_window_s)
        )
        self.replicas = ReplicaMetrics()
        self.checkpoints = CheckpointMetrics(enabled=spec.checkpoint.every_steps is not None)
        self.history = DisplayHistory()

    def on_event(self, event: job_events.JobEvent) -> None:
        now = self.now()
        self.history.on_event(event, now.unix_s, self.started.unix_s)
        match event:
            case job_events.GenerationStarted():
                self.ranks.start_generation(event.nodes)
            case job_events.ReplicationChanged():
                self.replicas.set_replication(event.enabled, now.unix_s)
            case job_events.StateEntered():
                self.time_accounting.on_state(event.state, now.clock_s)
                self.state, self.state_since = event.state, now
                self.generation = event.generation
                self.ranks.world_size = event.world_size
            case StepRecord():
                self._on_step(event, now)
            case job_events.Repaired():
                self.faults.on_repaired(event)
                self.time_accounting.recovery_finished(event.seconds, now.clock_s)
            case job_events.Resized():
                self.faults.resizes += 1
                self.time_accounting.recovery_finished(event.seconds, now.clock_s)
            case job_events.Resumed():
                self.steps.step = event.step
                if event.step != self.checkpoints.step:  # otherwise its time is known
                    self.checkpoints.set_newest(event.step, now.unix_s)
            case job_events.Checkpointed():
                self.checkpoints.on_committed(event, now.unix_s)
            case job_events.CheckpointFailed():
                self.checkpoints.failed += 1
            case job_events.FaultRecorded():
                self.faults.on_fault(event.fault)
            case job_events.LimitsChanged():
                self.worker_limits = (event.min_workers, event.max_workers)
            case job_events.StepReplicated():
                self.replicas.on_replicated(event.step, event.nbytes, now.unix_s)

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
        self.faults.on_step(record.step)
        self.steps.add_step(record, now.unix_s)
        self.checkpoints.on_step(now.unix_s)
        if self.spec.recovery.replicas > 0:
            self.replicas.own_node.mark_pending(now.unix_s)
        if record.mirrored_step is not None:
            self.replicas.on_mirrored(record.mirrored_step, record.mirrored_bytes, now.unix_s)
