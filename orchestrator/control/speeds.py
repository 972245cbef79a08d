"""Measures how fast each worker computes: tells who is steadily slow, and shares the work out."""

from __future__ import annotations

from collections.abc import Sequence

from rayzero.orchestrator.control.desk import Desk
from rayzero.orchestrator.notices import Warned
from rayzero.orchestrator.policies.balance import balanced
from rayzero.orchestrator.policies.speed import Speed
from rayzero.workers.messages import Report, WorkerInfo


class Speeds:
    """With `recovery.balance: auto` the next generation's samples follow the measured speed."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._speed = Speed()
        self._members: tuple[int, ...] = ()
        self._shares: tuple[float, ...] = ()

    def begin(self, workers: Sequence[WorkerInfo]) -> tuple[float, ...]:
        """A generation of these workers, by rank, is about to begin; its shares."""
        members = tuple(worker.index for worker in workers)
        current = self._shares if members == self._members else ()
        self._members, self._shares = members, ()
        if self._desk.plan.spec.recovery.balance == "auto":
            self._shares = balanced(self._speed.samples_per_s(members), current)
        self._speed.begin(members)
        return self._shares

    def add(self, worker: int, report: Report) -> None:
        """A worker of this generation finished a step."""
        gauges = report.gauges
        if "exposed_comm_s" not in gauges or self._desk.generation.rank_of(worker) is None:
            return  # there is no engine that measures
        compute_s = gauges["step_s"] - gauges["exposed_comm_s"]
        # Only ratios count, and the global batch is constant: a share stands for its samples.
        share = self._shares[report.rank] if self._shares else 1 / len(self._members)
        if change := self._speed.add(worker, compute_s, share):
            self._desk.see(Warned(str(change)))
