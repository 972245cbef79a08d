"""Values that a job's roles report, and the counts of its rollout buffer. No clock, no I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from rayzero.orchestrator.job_events import RolloutsCounted
from rayzero.workers.messages import RoleReport
from rayzero.workers.spread import Spread

MAX_ROLE_VALUES = 100
"""Maximum number of names under which a role's workers report values. Bounds the number of
Prometheus series."""


@dataclass
class RoleValues:
    """The values that one role's workers have reported.

    Args:
        tokens, weights_wait_s: sums over all workers.
        tokens_per_s: rate during the last step of the job; None before the first step, and while
            no tokens are reported.
        values: the newest value under each name.
        versions: version of the weights that each worker has, by the worker's number.
    """

    tokens: float = 0.0
    tokens_per_s: float | None = None
    weights_wait_s: float = 0.0
    values: dict[str, Spread] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    _of_step: dict[str, Spread] = field(default_factory=dict)
    _tokens_before: float = 0.0
    _weights_wait_before_s: float = 0.0

    @property
    def oldest_version(self) -> int | None:
        return min(self.versions.values(), default=None)

    def add(self, report: RoleReport) -> None:
        self.tokens += report.tokens
        self.weights_wait_s += report.weights_wait_s
        if report.version is not None:
            self.versions[report.number] = report.version
        for name, spread in report.values.items():
            if name in self.values or len(self.values) < MAX_ROLE_VALUES:
                self.values[name] = spread
                earlier = self._of_step.get(name)
                self._of_step[name] = spread if earlier is None else earlier + spread

    def take_step(self, step_s: float) -> Iterator[tuple[str, Spread]]:
        """Yields what was reported since the last step of the job, which took `step_s`."""
        yield from self._of_step.items()
        tokens, self._tokens_before = self.tokens - self._tokens_before, self.tokens
        wait_s = self.weights_wait_s - self._weights_wait_before_s
        self._weights_wait_before_s = self.weights_wait_s
        if self.tokens and step_s > 0:
            self.tokens_per_s = tokens / step_s
            yield "tokens_per_s", one(self.tokens_per_s)
        if self.weights_wait_s:
            yield "weights_wait_s", one(wait_s)
        self._of_step = {}


class RoleTable:
    """The roles of a job, by name, and its rollout buffer."""

    def __init__(self) -> None:
        self.by_role: defaultdict[str, RoleValues] = defaultdict(RoleValues)
        self.rollouts: RolloutsCounted | None = None
        """The newest counts of the buffer; None before the first."""
        self._task_wait_s: tuple[float, ...] = ()

    def on_report(self, report: RoleReport) -> None:
        self.by_role[report.role].add(report)

    def on_counts(self, event: RolloutsCounted) -> None:
        self.rollouts = event

    def on_worker_changed(self, role: str, number: int) -> None:
        """Forgets the version of a worker that was replaced or has ended."""
        self.by_role[role].versions.pop(number, None)

    def take_step(self, step_s: float) -> dict[str, Spread]:
        """Returns the values of the curves at a step of the job, by curve name: what was reported
        since the previous step, and the newest counts of the buffer."""
        values = {
            f"roles/{role}/{name}": spread
            for role, reported in self.by_role.items()
            for name, spread in reported.take_step(step_s)
        }
        if self.rollouts is None:
            return values
        counts = self.rollouts.counts
        before = self._task_wait_s or (0.0,) * len(counts.wait_s)
        waits = zip(self.rollouts.stages, counts.wait_s, before, strict=True)
        for role, wait_s, before_s in waits:
            is_same_buffer = wait_s >= before_s  # a new buffer counts from 0
            waited_s = wait_s - before_s if is_same_buffer else wait_s
            values[f"roles/{role}/task_wait_s"] = one(waited_s)
        self._task_wait_s = counts.wait_s
        values["rollouts/ready"] = one(counts.ready)
        values["rollouts/leased"] = one(sum(counts.leased))
        if counts.lag_mean is not None and counts.lag_max is not None:
            values["rollouts/lag"] = Spread(1, counts.lag_mean, counts.lag_mean, counts.lag_max)
        return values


def one(value: float) -> Spread:
    return Spread(1, value, value, value)
