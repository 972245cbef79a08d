"""Ranks, replicas, faults, checkpoints.

Faults, repairs and checkpoints: what they were and what they cost. Pure.

What each rank of the newest generation said last, and what all of them add up to. Pure.

How new the copies of the state are, on the ranks' own nodes and on others. Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial

from rayzero.orchestrator.job_events import Checkpointed, Repaired
from rayzero.orchestrator.metrics.goodput import PHASE_CATEGORY
from rayzero.orchestrator.metrics.primitives import (
    CHECKPOINT_BUCKETS_S,
    RECOVERY_BUCKETS_S,
    STEP_BUCKETS_S,
    Histogram,
)
from rayzero.orchestrator.policies.failure import Fault, FaultBudget, budget_used
from rayzero.workers.messages import Heartbeat, StepReport

_RecoveryHistogram = partial(Histogram, RECOVERY_BUCKETS_S)


@dataclass
class FaultMetrics:
    """Args:
    budget: of hardware faults.
    by_cause: faults on record.
    """

    budget: FaultBudget
    faults_by_cause: Counter[str] = field(default_factory=Counter)
    repairs_by_cause: Counter[str] = field(default_factory=Counter)
    resizes: int = 0
    steps_redone: int = 0
    recovery_time: Histogram = field(default_factory=_RecoveryHistogram)
    phase_times: dict[str, Histogram] = field(
        default_factory=lambda: {part: _RecoveryHistogram() for part in PHASE_CATEGORY}
    )
    _recent: list[Fault] = field(default_factory=list)

    def judged(self, fault: Fault) -> None:
        self.faults_by_cause[str(fault.cause)] += 1
        since_s = fault.at_s - self.budget.window_s
        self._recent = [one for one in self._recent if one.at_s > since_s]
        self._recent.append(fault)

    def on_repaired(self, notice: Repaired) -> None:
        self.repairs_by_cause[notice.cause] += 1
        self.steps_redone += notice.steps_redone
        self.recovery_time.add(notice.total_s)
        for part, seconds in notice.seconds.items():
            self.phase_times.setdefault(part, _RecoveryHistogram()).add(seconds)

    def budget_used(self, now_s: float) -> int:
        """How much of the budget is gone at the moment."""
        return budget_used(self._recent, self.budget, now_s)


@dataclass
class CheckpointMetrics:
    """What was written, and the newest there is; `step` is None when there is none.

    Args:
        wanted: whether the job asks for any.
        since_unix_s: when this run's first step was finished; None before.
    """

    enabled: bool = False
    first_step_unix_s: float | None = None
    written: int = 0
    failed: int = 0
    step: int | None = None
    at_unix_s: float = 0.0
    nbytes: int = 0
    write_time: Histogram = field(default_factory=partial(Histogram, CHECKPOINT_BUCKETS_S))
    stall_time: Histogram = field(default_factory=partial(Histogram, STEP_BUCKETS_S))

    def on_committed(self, notice: Checkpointed, unix_s: float) -> None:
        self.written += 1
        self.nbytes = notice.nbytes
        self.write_time.add(notice.seconds)
        self.stall_time.add(notice.stopped_s)
        self.set_newest(notice.step, unix_s)

    def on_step(self, unix_s: float) -> None:
        """A step was finished."""
        if self.first_step_unix_s is None:
            self.first_step_unix_s = unix_s

    @property
    def unprotected_since_unix_s(self) -> float | None:
        """Since when steps are in no checkpoint; None where none is wanted, or nothing is lost."""
        if not self.enabled:
            return None
        return self.first_step_unix_s if self.step is None else self.at_unix_s

    def set_newest(self, step: int, unix_s: float) -> None:
        """The newest one, by now."""
        self.step, self.at_unix_s = step, unix_s


_TRAFFIC_PREFIX = "collectives/"


_NO_GAUGES: Mapping[str, float] = {}

TrafficTotals = defaultdict[tuple[str, str], float]
"""By (bytes or calls, collective)."""


@dataclass
class RankMetrics:
    """One rank.

    Args:
        report: of its last step in this generation; None before the first.
        node: where it lives; empty before its first heartbeat.
        exposed_s, data_wait_s: waited for peers and for data since it has this number.
    """

    report: StepReport | None = None
    beat: Heartbeat | None = None
    node: str = ""
    exposed_comm_s: float = 0.0
    data_wait_s: float = 0.0

    def gauge(self, name: str) -> float | None:
        return self.report.gauges.get(name) if self.report is not None else None

    def copied(self) -> RankMetrics:
        return RankMetrics(self.report, self.beat, self.node, self.exposed_comm_s, self.data_wait_s)

    def add_traffic(self, moved: TrafficTotals) -> None:
        """Adds what its engine has moved so far."""
        gauges = self.report.gauges if self.report is not None else _NO_GAUGES
        for name, which in _traffic_gauges(tuple(gauges)):
            moved[which] += max(0.0, gauges[name])


@dataclass
class RankMetricsTable:
    """A rank that a new generation no longer has is forgotten.

    A report costs about a microsecond: engines count their traffic from their beginning, so it is
    enough to add the last count of each when an engine goes, and when somebody wants to know.

    Args:
        by_rank: those that said something.
        gone: calls and bytes by collective, of engines that are gone.
    """

    by_rank: defaultdict[int, RankMetrics] = field(default_factory=lambda: defaultdict(RankMetrics))
    departed_traffic: TrafficTotals = field(default_factory=lambda: defaultdict(float))

    def resize(self, world_size: int) -> None:
        """There are so many from now on."""
        for rank in [rank for rank in self.by_rank if rank >= world_size]:
            self.by_rank.pop(rank).add_traffic(self.departed_traffic)

    def copied(self) -> RankMetricsTable:
        """A copy, in the order of the ranks."""
        rows = {rank: metrics.copied() for rank, metrics in sorted(self.by_rank.items())}
        return RankMetricsTable(defaultdict(RankMetrics, rows), self.departed_traffic.copy())

    def reported(self, report: StepReport) -> None:
        one, gauges = self.by_rank[report.rank], report.gauges
        if one.report is not None and one.report.generation != report.generation:
            one.add_traffic(self.departed_traffic)
        if (exposed_s := gauges.get("exposed_comm_s", 0.0)) > 0:
            one.exposed_comm_s += exposed_s
        if (data_wait_s := gauges.get("phases/data", 0.0)) > 0:
            one.data_wait_s += data_wait_s
        one.report = report

    def on_heartbeat(self, beat: Heartbeat, node: str) -> None:
        one = self.by_rank[beat.rank]
        one.beat, one.node = beat, node

    def traffic(self) -> TrafficTotals:
        """Calls and bytes by collective, of all ranks since the run began."""
        moved = self.departed_traffic.copy()
        for one in self.by_rank.values():
            one.add_traffic(moved)
        return moved


@lru_cache(maxsize=256)
def _traffic_gauges(names: tuple[str, ...]) -> tuple[tuple[str, tuple[str, str]], ...]:
    """Those of some gauges that count traffic, each with what it counts. Every rank reports the
    same ones."""
    found = []
    for name in names:
        if name.startswith(_TRAFFIC_PREFIX):
            collective, what = name.removeprefix(_TRAFFIC_PREFIX).rsplit("/", 1)
            found.append((name, (what, collective)))
    return tuple(found)


_MAX_REMEMBERED_STEPS = 64
"""Mirrored steps whose time is remembered; a vault pins fewer that wait to be copied."""


@dataclass
class ReplicaLevel:
    """The newest step of which every rank's share lies there.

    Args:
        step: None before the first.
        at_unix_s: when that step was finished.
        since_unix_s: when the first step was finished that was to be copied there; None while
            nothing is.
    """

    step: int | None = None
    at_unix_s: float = 0.0
    nbytes: float = 0.0
    first_pending_unix_s: float | None = None

    @property
    def unprotected_since_unix_s(self) -> float | None:
        """Since when steps are lost with what holds them now; None where no copy is wanted."""
        if self.first_pending_unix_s is None or self.step is None:
            return self.first_pending_unix_s
        return max(self.first_pending_unix_s, self.at_unix_s)

    def mark_pending(self, unix_s: float) -> None:
        """A step was finished that is to be copied there, this one or a later one in its place."""
        if self.first_pending_unix_s is None:
            self.first_pending_unix_s = unix_s


@dataclass
class ReplicaMetrics:
    """Args:
    node: in the vaults of the ranks' own nodes; outlives a process.
    other: in those of other nodes; outlives a node.
    """

    own_node: ReplicaLevel = field(default_factory=ReplicaLevel)
    other_nodes: ReplicaLevel = field(default_factory=ReplicaLevel)
    _finish_times: deque[tuple[int, float]] = field(
        default_factory=lambda: deque(maxlen=_MAX_REMEMBERED_STEPS)
    )

    @property
    def by_location(self) -> dict[str, ReplicaLevel]:
        return {"node": self.own_node, "other": self.other_nodes}

    def on_mirrored(self, step: int, nbytes: float, unix_s: float) -> None:
        """As of a step that was just finished."""
        self.own_node.nbytes = nbytes
        if step != self.own_node.step:
            self.own_node.step, self.own_node.at_unix_s = step, unix_s
            self._finish_times.append((step, unix_s))

    def copied(self, step: int, nbytes: float, unix_s: float) -> None:
        """It lies on other nodes now. A step that nobody has seen finished yet is as new as now."""
        finished = [at_s for number, at_s in self._finish_times if number == step]
        other = self.other_nodes
        other.step, other.nbytes = step, nbytes
        other.at_unix_s = finished[-1] if finished else unix_s

    def sends(self, so: bool, unix_s: float) -> None:
        """Whether the step that was just finished is for other nodes, too. Where there are none
        any more, neither are copies on them."""
        if so:
            self.other_nodes.mark_pending(unix_s)
        else:
            self.other_nodes = ReplicaLevel()
