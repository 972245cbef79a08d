"""The metrics of one job: its facts, and counts of events that only its process keeps. No I/O."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

from rayzero.orchestrator import job_events
from rayzero.orchestrator.facts import JobFacts
from rayzero.orchestrator.job_events import Checkpointed, Repaired
from rayzero.orchestrator.metrics.curves import CurveSet
from rayzero.orchestrator.metrics.goodput import (
    PHASE_CATEGORY,
    TimeAccounting,
    TimeBreakdown,
    TimeCategory,
)
from rayzero.orchestrator.metrics.rank_metrics import RankMetricsTable
from rayzero.orchestrator.metrics.role_table import RoleTable
from rayzero.orchestrator.metrics.stream_table import StreamTable
from rayzero.orchestrator.policies.failure import (
    HARDWARE_CAUSES,
    FaultBudget,
    FaultCause,
    faults_in_budget,
)
from rayzero.orchestrator.progress import StepPace, StepRecord
from rayzero.orchestrator.spec import JobSpec

STEP_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 30, 60, 300),
)
RECOVERY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
CHECKPOINT_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Histogram:
    """Counts values by upper bound. `bounds` ascend, without the last, infinite one."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Returns (upper bound, number of values up to it) of each bound; the last is `+Inf`."""
        bounds = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))


_MAX_REMEMBERED_STEPS = 64
"""How many mirrored steps' finish times are kept. A vault pins fewer steps for replication."""

_RecoveryHistogram = partial(Histogram, RECOVERY_BUCKETS_S)


@dataclass
class RecoveryTimes:
    """How long repairs took, and their phases."""

    total: Histogram = field(default_factory=_RecoveryHistogram)
    phases: dict[str, Histogram] = field(
        default_factory=lambda: {phase: _RecoveryHistogram() for phase in PHASE_CATEGORY}
    )

    def add(self, event: Repaired) -> None:
        self.total.add(event.total_s)
        for phase, seconds in event.seconds.items():
            self.phases.setdefault(phase, _RecoveryHistogram()).add(seconds)


@dataclass
class StoredStep:
    """The newest step that is stored in one kind of place, with the state of every rank.

    Args:
        step, at_unix_s: number of the step, and when it finished; None before the first.
        first_pending_unix_s: when the first step that is to be stored there finished; None if there
            is none.
    """

    step: int | None = None
    at_unix_s: float | None = None
    nbytes: float = 0.0
    first_pending_unix_s: float | None = None

    @property
    def unprotected_since_unix_s(self) -> float | None:
        """Time since when training is not stored there; None if nothing is to be stored."""
        if self.first_pending_unix_s is None or self.at_unix_s is None:
            return self.first_pending_unix_s
        return max(self.first_pending_unix_s, self.at_unix_s)

    def mark_pending(self, unix_s: float) -> None:
        """Records that a step finished that is to be stored there, or a later step instead."""
        if self.first_pending_unix_s is None:
            self.first_pending_unix_s = unix_s


@dataclass
class CheckpointMetrics(StoredStep):
    """The checkpoints that this process has written. `at_unix_s` is when the newest was committed.
    `enabled` if the job writes checkpoints while it trains."""

    enabled: bool = False
    write_time: Histogram = field(default_factory=partial(Histogram, CHECKPOINT_BUCKETS_S))
    stall_time: Histogram = field(default_factory=partial(Histogram, STEP_BUCKETS_S))

    def on_committed(self, event: Checkpointed, unix_s: float) -> None:
        self.nbytes = event.nbytes
        self.write_time.add(event.seconds)
        self.stall_time.add(event.stopped_s)
        self.set_newest(event.step, unix_s)

    def set_newest(self, step: int, unix_s: float) -> None:
        self.step, self.at_unix_s = step, unix_s
        self.on_step(unix_s)

    def on_step(self, unix_s: float) -> None:
        if self.enabled:
            self.mark_pending(unix_s)


@dataclass
class ReplicaMetrics:
    """Replicas in the vaults of the ranks' own nodes, which outlive a worker, and in those of other
    nodes, which outlive a node."""

    own_node: StoredStep = field(default_factory=StoredStep)
    other_nodes: StoredStep = field(default_factory=StoredStep)
    has_other_nodes: bool = False
    _finish_times: deque[tuple[int, float]] = field(
        default_factory=lambda: deque(maxlen=_MAX_REMEMBERED_STEPS)
    )

    @property
    def by_location(self) -> dict[str, StoredStep]:
        return {"node": self.own_node, "other": self.other_nodes}

    def on_mirrored(self, step: int, nbytes: float, unix_s: float) -> None:
        """Called when a finished step shows that the vaults of all ranks' own nodes hold `step`."""
        self.own_node.nbytes = nbytes
        if step != self.own_node.step:
            self.own_node.step, self.own_node.at_unix_s = step, unix_s
            self._finish_times.append((step, unix_s))

    def on_replicated(self, step: int, nbytes: float, unix_s: float) -> None:
        """Called when other nodes hold `step`. If its finish time is unknown, `unix_s` is used."""
        finished = [at_s for number, at_s in self._finish_times if number == step]
        other = self.other_nodes
        other.step, other.nbytes = step, nbytes
        other.at_unix_s = finished[-1] if finished else unix_s

    def on_step(self, unix_s: float) -> None:
        """Called when a step finished that is to be replicated. While all ranks are on one node,
        there are no replicas on other nodes."""
        self.own_node.mark_pending(unix_s)
        if self.has_other_nodes:
            self.other_nodes.mark_pending(unix_s)
        else:
            self.other_nodes = StoredStep()


_PHASE_PREFIX = "phases/"
_StepHistogram = partial(Histogram, STEP_BUCKETS_S)

STEP_PHASES = ("data", "forward", "backward", "reduce", "update", "publish", "mirror", "other")
"""The phases of an engine's step."""

MAX_USER_METRICS = 100
"""Maximum number of user metric names of a job; bounds the number of Prometheus series."""


@dataclass
class StepSeries:
    """The steps that finished in this process.

    Args:
        last_record: None before the first step.
        pace: the recent duration of a step.
        user_values: the last value under each name; a step need not report every name.
        user_values_dropped: number of values under names beyond the first `MAX_USER_METRICS`.
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
        """Returns the mean over ranks of a value that they reported for the last step."""
        return self.last_record.gauges.get(name) if self.last_record is not None else None

    @property
    def data_wait_ratio(self) -> float | None:
        """Share of the last step in which ranks waited for data, the mean over ranks."""
        waited_s = self.gauge(f"{_PHASE_PREFIX}data")
        if waited_s is None or self.last_record is None or self.last_record.step_s <= 0:
            return None
        return min(1.0, waited_s / self.last_record.step_s)

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
    """Counts a job's events.

    Args:
        stage: the ZeRO stage; None without an engine config.
        now: returns the current time.
        facts: the facts of the job's run, whose counts continue.
    """

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
        self.roles = RoleTable()
        self.streams = StreamTable()
        if facts.run:
            ago_s = max(0.0, started.unix_s - facts.began_at_s)
            self.time_accounting.restore(facts.counters.seconds, facts.best_step, ago_s)
        if facts.checkpoint_step is not None:
            self.checkpoints.set_newest(facts.checkpoint_step, facts.checkpoint_at_s)

    def on_event(self, event: job_events.JobEvent, facts: JobFacts) -> None:
        """Counts an event. `facts` already include the event."""
        now, self.facts = self.now(), facts
        match event:
            case job_events.GenerationStarted():
                self.ranks.start_generation(event.nodes)
                self.replicas.has_other_nodes = len(set(event.nodes)) > 1
            case job_events.StateEntered():
                self.time_accounting.on_state(event.state, now.clock_s)
                self.state_since = now
            case job_events.Reattached():
                self.time_accounting.on_reattached()
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
            case (
                job_events.RoleWorkerReady(role, number)
                | job_events.RoleWorkerEnded(role, number)
                | job_events.RoleFault(role, number)
            ):
                self.roles.on_worker_changed(role, number)
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
        """The recorded faults, and the one that ended the job."""
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
        self.curves.add_spreads(record.step, self.roles.take_step(record.step_s))
        self.curves.add_spreads(record.step, self.streams.add_step(record))
        self.checkpoints.on_step(now.unix_s)
        if self.spec.recovery.replicas > 0:
            self.replicas.on_step(now.unix_s)
        if record.mirrored_step is not None:
            self.replicas.on_mirrored(record.mirrored_step, record.mirrored_bytes, now.unix_s)
