"""JobMetrics (aggregate), steps.

The job in numbers as it stands: everything that is told of it, in one place. Pure.

What the finished steps say. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from math import isfinite

from rayzero.orchestrator.job_events import (
    Checkpointed,
    CheckpointFailed,
    FaultDetected,
    FaultRecorded,
    HeartbeatReceived,
    JobEvent,
    LimitsChanged,
    Repaired,
    ReplicationChanged,
    Resized,
    Resumed,
    StateEntered,
    StepReplicated,
    StepReported,
)
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.metrics.components import (
    CheckpointMetrics,
    FaultMetrics,
    RankMetricsTable,
    ReplicaMetrics,
)
from rayzero.orchestrator.metrics.goodput import TimeAccounting, TimeBreakdown, TimeCategory
from rayzero.orchestrator.metrics.primitives import (
    STEP_BUCKETS_S,
    DisplayHistory,
    GaugeFilter,
    Histogram,
    UserMetrics,
)
from rayzero.orchestrator.policies.failure import FaultBudget
from rayzero.orchestrator.progress import StepRecord

_PHASE_PREFIX = "phases/"


_SMOOTHING = 0.1

_StepHistogram = partial(Histogram, STEP_BUCKETS_S)

STEP_PHASES = ("data", "forward", "backward", "reduce", "update", "publish", "mirror", "other")
"""What an engine's steps are made of."""


@dataclass
class StepTotals:
    """Totals are this run's: steps that were done again count again. One that was finished, but
    that no rank lived to report, counts as the next one does.

    Args:
        step: the last finished step in the job's state.
        last: the newest record; None before the first step.
        pace_s: what a step takes, of late.
    """

    step: int = 0
    done: int = 0
    last_record: StepRecord | None = None
    last_at_unix_s: float | None = None
    smoothed_step_s: float = 0.0
    tokens: float = 0.0
    samples: float = 0.0
    skipped: float = 0.0
    nonfinite: int = 0
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
        smooth = _SMOOTHING if self.smoothed_step_s else 1.0
        self.smoothed_step_s += smooth * (record.step_s - self.smoothed_step_s)
        self.tokens += record.tokens * count
        self.samples += gauges.get("step_samples", 0.0) * count
        self.skipped += gauges.get("skipped", 0.0)
        self.nonfinite += record.loss is not None and not isfinite(record.loss)
        self.step_time.add(record.step_s)
        for name, seconds in gauges.items():
            if name.startswith(_PHASE_PREFIX):
                phase = name.removeprefix(_PHASE_PREFIX)
                self.phase_times.setdefault(phase, _StepHistogram()).add(seconds)

    def remaining_s(self, target: int | None) -> float | None:
        """How long the rest takes if all goes as of late; None when nobody knows."""
        if target is None or self.last_record is None:
            return None
        return max(0, target - self.step) * self.smoothed_step_s


@dataclass(frozen=True)
class Timestamps:
    """A moment, by two clocks.

    Args:
        s: of the controller's clock, of which only differences mean anything.
        unix_s: Unix time.
    """

    clock_s: float
    unix_s: float


@dataclass(frozen=True)
class JobInfo:
    """What is known of a job before it begins.

    Args:
        steps: how many it asks for; None: nobody knows.
        stage: the ZeRO stage; None without an engine config.
        replicas: whether steps are copied out of the ranks' processes.
        checkpoints: whether any are written as it trains.
    """

    name: str
    target_steps: int | None
    stage: int | None
    min_workers: int
    max_workers: int
    hang_timeout_s: float
    fault_budget: FaultBudget
    has_replicas: bool = True
    has_checkpoints: bool = False


METRIC_EVENTS: tuple[type[JobEvent], ...] = (
    StateEntered,
    StepRecord,
    Repaired,
    Resized,
    FaultDetected,
    Resumed,
    Checkpointed,
    CheckpointFailed,
    StepReported,
    HeartbeatReceived,
    ReplicationChanged,
    FaultRecorded,
    LimitsChanged,
    StepReplicated,
)
"""The events that `JobMetrics.on_event` counts."""


class JobMetrics:
    """Counts a job's events. It has no clock: every call gets the time."""

    def __init__(self, facts: JobInfo, now: Timestamps, user_gauges: GaugeFilter) -> None:
        self.info = facts
        self.started = now
        self.state = State.PENDING
        self.state_since = now
        self.generation = 0
        self.world_size = 0
        self.worker_limits = (facts.min_workers, facts.max_workers)
        self.time_accounting = TimeAccounting(now.clock_s)
        self.steps = StepTotals()
        self.user_metrics = UserMetrics(user_gauges)
        self.ranks = RankMetricsTable()
        self.faults = FaultMetrics(facts.fault_budget)
        self.replicas = ReplicaMetrics()
        self.checkpoints = CheckpointMetrics(facts.has_checkpoints)
        self.history = DisplayHistory()
        self.resumed_at_step: int | None = None
        """The step that an adopted run stood at, until it goes on."""

    def on_event(self, notice: JobEvent, now: Timestamps) -> None:
        match notice:  # the frequent events first
            case StepReported():
                self.ranks.reported(notice.report)
            case HeartbeatReceived():
                self.ranks.on_heartbeat(notice.heartbeat, notice.node)
            case ReplicationChanged():
                self.replicas.sends(notice.enabled, now.unix_s)
            case StateEntered():
                self._on_state(notice, now)
            case StepRecord():
                self._on_step(notice, now)
            case Repaired() | Resized():
                self._on_recovery(notice, now)
            case FaultDetected():
                self._on_fault(notice, now)
            case Resumed():
                self.steps.step = notice.step
                if notice.step != self.checkpoints.step:  # else its age is known
                    self.checkpoints.set_newest(notice.step, now.unix_s)
            case Checkpointed():
                self._on_checkpoint(notice, now)
            case CheckpointFailed():
                self.checkpoints.failed += 1
            case FaultRecorded():
                self.faults.judged(notice.fault)
            case LimitsChanged():
                self.worker_limits = (notice.min_workers, notice.max_workers)
            case StepReplicated():
                self.replicas.copied(notice.step, notice.nbytes, now.unix_s)
            case _:
                pass

    def time_breakdown(self, now: Timestamps) -> TimeBreakdown:
        return self.time_accounting.breakdown_at(now.clock_s)

    def _on_state(self, notice: StateEntered, now: Timestamps) -> None:
        self.time_accounting.on_state(notice.state, now.clock_s)
        self.state, self.state_since = notice.state, now
        self.generation = notice.generation
        if notice.world_size != self.world_size:
            self.world_size = notice.world_size
            self.ranks.resize(notice.world_size)
        if notice.state is State.RUNNING:
            self.history.generations.append(
                {
                    "at_s": now.unix_s,
                    "generation": notice.generation,
                    "world_size": notice.world_size,
                }
            )

    def _on_step(self, record: StepRecord, now: Timestamps) -> None:
        checkpoint_s = record.waits.get("checkpoint_s", 0.0)
        waits = {
            TimeCategory.DATA: record.waits.get("phases/data", 0.0),
            TimeCategory.MIRROR: max(0.0, record.waits.get("phases/mirror", 0.0) - checkpoint_s),
            TimeCategory.CHECKPOINT: checkpoint_s,
        }
        self.time_accounting.on_step(record.step, record.step_s, waits, now.clock_s)
        if self.resumed_at_step is not None:
            self.faults.steps_redone += max(0, self.resumed_at_step - record.step + 1)
            self.resumed_at_step = None
        if record.loss is not None:
            if record.step <= self.steps.step:
                self.history.loss.rewind(record.step)
            self.history.loss.add(record.step, record.loss)
        self.steps.add_step(record, now.unix_s)
        self.user_metrics.add(record.gauges)
        self.checkpoints.on_step(now.unix_s)
        if self.info.has_replicas:
            self.replicas.own_node.mark_pending(now.unix_s)
        if record.mirrored_step is not None:
            self.replicas.on_mirrored(record.mirrored_step, record.mirrored_bytes, now.unix_s)

    def _on_recovery(self, notice: Repaired | Resized, now: Timestamps) -> None:
        entry: dict[str, object] = {
            "at_s": now.unix_s,
            "kind": "repair" if isinstance(notice, Repaired) else "resize",
            "cause": notice.cause if isinstance(notice, Repaired) else notice.reason,
            "step": notice.step,
            "steps_redone": notice.steps_redone if isinstance(notice, Repaired) else 0,
            "world_size_before": notice.world_size_before,
            "world_size": notice.world_size,
            "total_s": notice.total_s,
            "seconds": dict(notice.seconds),
        }
        self.history.recoveries.append(entry)
        if isinstance(notice, Repaired):
            self.faults.on_repaired(notice)
        else:
            self.faults.resizes += 1
        self.time_accounting.recovery_finished(notice.seconds, now.clock_s)

    def _on_fault(self, notice: FaultDetected, now: Timestamps) -> None:
        entry = {"cause": notice.cause, "rank": notice.rank, "step": notice.step}
        self.history.faults.append({"at_s": now.unix_s, **entry, "text": notice.text})

    def _on_checkpoint(self, notice: Checkpointed, now: Timestamps) -> None:
        self.checkpoints.on_committed(notice, now.unix_s)
        entry = {"step": notice.step, "bytes": notice.nbytes, "seconds": notice.seconds}
        self.history.checkpoints.append({"at_s": now.unix_s, **entry})
