"""Histograms, and the newest checkpoint and replicas. No clock, no I/O."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

from rayzero.orchestrator.job_events import Checkpointed, Repaired
from rayzero.orchestrator.metrics.goodput import PHASE_CATEGORY

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
        """(upper bound, number of values up to it); the last bound is `+Inf`."""
        bounds = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))


_MAX_REMEMBERED_STEPS = 64
"""Mirrored steps whose finish time is kept; a vault pins fewer that wait to be replicated."""

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
    """The newest step of which every rank's state is stored in a place.

    Args:
        step, at_unix_s: its number, and when it finished; None before the first.
        first_pending_unix_s: when the first step finished that is to be stored there; None if none
            is.
    """

    step: int | None = None
    at_unix_s: float | None = None
    nbytes: float = 0.0
    first_pending_unix_s: float | None = None

    @property
    def unprotected_since_unix_s(self) -> float | None:
        """Start of the training that is not stored there; None if nothing is to be."""
        if self.first_pending_unix_s is None or self.at_unix_s is None:
            return self.first_pending_unix_s
        return max(self.first_pending_unix_s, self.at_unix_s)

    def mark_pending(self, unix_s: float) -> None:
        """A step finished that is to be stored there, itself or a later one in its place."""
        if self.first_pending_unix_s is None:
            self.first_pending_unix_s = unix_s


@dataclass
class CheckpointMetrics(StoredStep):
    """Checkpoints of this process. `at_unix_s` is when the newest was committed; `enabled` if the
    job writes checkpoints while it trains."""

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
    _finish_times: deque[tuple[int, float]] = field(
        default_factory=lambda: deque(maxlen=_MAX_REMEMBERED_STEPS)
    )

    @property
    def by_location(self) -> dict[str, StoredStep]:
        return {"node": self.own_node, "other": self.other_nodes}

    def on_mirrored(self, step: int, nbytes: float, unix_s: float) -> None:
        """All vaults of the ranks' own nodes hold `step`, as of a step that just finished."""
        self.own_node.nbytes = nbytes
        if step != self.own_node.step:
            self.own_node.step, self.own_node.at_unix_s = step, unix_s
            self._finish_times.append((step, unix_s))

    def on_replicated(self, step: int, nbytes: float, unix_s: float) -> None:
        """Other nodes hold `step`. Without a known finish time it counts as finished now."""
        finished = [at_s for number, at_s in self._finish_times if number == step]
        other = self.other_nodes
        other.step, other.nbytes = step, nbytes
        other.at_unix_s = finished[-1] if finished else unix_s

    def set_replication(self, enabled: bool, unix_s: float) -> None:
        """Whether the step that just finished is to be replicated to other nodes. Without other
        nodes there are no replicas on them either."""
        if enabled:
            self.other_nodes.mark_pending(unix_s)
        else:
            self.other_nodes = StoredStep()
