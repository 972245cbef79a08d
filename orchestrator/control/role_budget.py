"""The faults of a role's workers, and what they cost: a delay, or the job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from time import time

from rayzero.orchestrator.control.loop import JobLoop, JobMachine
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.job_events import RoleFault
from rayzero.orchestrator.machine import FaultFatal
from rayzero.orchestrator.plan import RolePlan
from rayzero.orchestrator.policies import placement, role_faults
from rayzero.orchestrator.policies.failure import Fault, FaultBudget


@dataclass(eq=False)
class RoleBudget:
    """Records the faults of one role, including those of an adopted run."""

    _plan: RolePlan
    _loop: JobLoop
    _machine: JobMachine
    _events: EventBus

    def __post_init__(self) -> None:
        recovery = self._plan.spec.recovery
        self._budget = FaultBudget(recovery.max_faults, recovery.fault_window_s)
        past = self._events.facts.role(self._plan.name)
        self._faults = past.faults_on_clock(self._loop.now_s(), time())

    def record(self, fault: Fault, running: int) -> float | None:
        """Records a fault; `running` workers are left. Returns the delay of the replacement; None
        if the job fails."""
        self._faults.append(fault)
        name, window_s = self._plan.name, self._budget.window_s
        error = role_faults.decide(name, self._faults, self._budget)
        delay_s = placement.restart_backoff_s(
            self._faults, fault.worker.node_id, window_s, fault.at_s
        )
        text = f"{role_faults.describe_worker(name, fault)}: {fault.detail}"
        if fault.traceback and error is None:
            text = f"{text}\n{fault.traceback}"
        self._events.emit(
            RoleFault(
                name,
                fault.rank or 0,
                fault.cause,
                fault.worker,
                text,
                running,
                is_fatal=error is not None,
                window_s=window_s,
            )
        )
        if error is not None:
            self._machine.post(FaultFatal(error))
            return None
        return delay_s

    def bad_nodes(self, nodes: Iterable[str]) -> frozenset[str]:
        """Returns which of these nodes had too many of the faults."""
        window_s, now_s = self._budget.window_s, self._loop.now_s()
        return placement.quarantined_nodes(self._faults, {*nodes}, window_s, now_s)
