"""The failure policy: wait for details, recover, or fail the job. Budgets are kept by cause.

Faults arrive in groups: when a worker dies, its peers' collectives fail, often before the death
itself is reported. So a failed collective is decided only after a grace period.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.errors import JobConfigError, JobFailedError
from rayzero.workers.messages import WorkerInfo


class FaultCause(StrEnum):
    """Why a worker no longer trains, in order of precedence as the root cause."""

    NODE_LOST = "node"
    PROCESS_LOST = "lost"
    HANG = "hang"
    PREEMPTED = "preempted"
    CONFIG = "config"
    ENTRYPOINT = "entrypoint"
    STATE = "state"
    DATA = "data"
    USER_CODE = "user"
    COLLECTIVE = "collective"


HARDWARE_CAUSES = frozenset(
    {FaultCause.NODE_LOST, FaultCause.PROCESS_LOST, FaultCause.HANG, FaultCause.COLLECTIVE}
)
"""Causes outside the training function; they use the budget `recovery.max_faults`."""
USER_CODE_CAUSES = frozenset({FaultCause.DATA, FaultCause.USER_CODE})
"""Causes in the training function; they have a budget of their own, of the same size."""

_CAUSE_RANK = {cause: index for index, cause in enumerate(FaultCause)}


@dataclass(frozen=True)
class Fault:
    """One worker's fault.

    Args:
        rank: in the generation it was a member of; None for a worker that was no member.
        step: the step in progress, counted from 1; 0 before the first.
        detail: the exception, or the cluster's report on the process; empty until it arrives.
        at_s: when the controller detected it.
        traceback: the user's frames, for user code.
    """

    cause: FaultCause
    worker: WorkerInfo
    rank: int | None
    step: int
    detail: str
    at_s: float = 0.0
    generation: int = 0
    traceback: str = ""


@dataclass(frozen=True)
class FaultBudget:
    """How many faults of a kind may happen within any window of that length."""

    max_faults: int
    window_s: float


@dataclass(frozen=True)
class FailureContext:
    """Inputs of a decision beside the faults.

    Args:
        steps: steps finished by this run of the job.
        restored: whether the generation loaded a state, which may be damaged.
    """

    budget: FaultBudget
    steps: int
    restored: bool


@dataclass(frozen=True)
class WaitForDetails:
    """Decide again when another fault arrives, or when the grace period is over."""


@dataclass(frozen=True)
class FailJob:
    """End the job with this error."""

    error: RayzeroError


@dataclass(frozen=True)
class RecoverJob:
    """Continue without the lost workers. `root` explains the faults."""

    root: Fault


Decision: TypeAlias = WaitForDetails | FailJob | RecoverJob


def decide(
    faults: Sequence[Fault], earlier: Sequence[Fault], job: FailureContext, *, grace_over: bool
) -> Decision:
    """Decides about the pending faults of a generation.

    Args:
        faults: in the order of detection; at least one.
        earlier: the faults recovered from so far, the oldest first.
        grace_over: whether the wait for a better explanation has ended.
    """
    root = root_cause(faults)
    if root.cause is FaultCause.COLLECTIVE and not grace_over:
        return WaitForDetails()
    error = _fatal_error(root, earlier, job)
    if error is None:
        return RecoverJob(root)
    if root.cause in HARDWARE_CAUSES and not root.detail and not grace_over:
        return WaitForDetails()  # the cluster is about to report details for the error message
    return FailJob(error)


def root_cause(faults: Sequence[Fault]) -> Fault:
    """The fault that explains the others."""
    return min(faults, key=lambda fault: _CAUSE_RANK[fault.cause])


def budget_used(faults: Sequence[Fault], budget: FaultBudget, now_s: float) -> int:
    """How many of these faults count against the hardware budget at `now_s`."""
    since_s = now_s - budget.window_s
    members = [f for f in faults if f.rank is not None and f.cause in HARDWARE_CAUSES]
    return len(incidents([fault for fault in members if fault.at_s > since_s]))


def incidents(faults: Sequence[Fault]) -> list[Fault]:
    """One fault per generation and node, however many of its workers were lost."""
    return list({(fault.generation, fault.worker.node_id): fault for fault in faults}.values())


def describe_fault(fault: Fault) -> str:
    """`rank 1 on node a (pid 7) was lost in step 8: it was killed`"""
    worker = fault.worker
    who = f"worker {worker.index}" if fault.rank is None else f"rank {fault.rank}"
    when = f"in step {fault.step}" if fault.step else "before the first step"
    what = {
        FaultCause.NODE_LOST: "was lost with its node",
        FaultCause.PROCESS_LOST: "was lost",
        FaultCause.PREEMPTED: "was lost with its node, which was being drained,",
        FaultCause.HANG: "hung",
        FaultCause.COLLECTIVE: "had a collective fail, though no worker died,",
        FaultCause.STATE: "could not load the state",
    }.get(fault.cause, "raised an exception")
    detail = fault.detail or "its process ended"
    return f"{who} on node {worker.node} (pid {worker.pid}) {what} {when}: {detail}"


def _fatal_error(root: Fault, earlier: Sequence[Fault], job: FailureContext) -> RayzeroError | None:
    """The error that fails the job; None if it can continue."""
    if root.cause in (FaultCause.CONFIG, FaultCause.ENTRYPOINT):
        return JobConfigError(root.detail, traceback=root.traceback)
    if root.cause is FaultCause.STATE:
        return None if job.restored else JobFailedError(root.detail)
    if root.cause is FaultCause.PREEMPTED:
        return None
    if root.cause in USER_CODE_CAUSES:
        return _user_code_error(root, earlier, job)
    if _exceeds_budget(HARDWARE_CAUSES, root, earlier, job.budget):
        return _hardware_error(root, earlier, job.budget)
    return None


def _user_code_error(
    root: Fault, earlier: Sequence[Fault], job: FailureContext
) -> JobFailedError | None:
    repeated = any(
        _signature(fault) == _signature(root)
        for fault in earlier
        if fault.cause in USER_CODE_CAUSES
    )
    if not (
        job.steps == 0 or repeated or _exceeds_budget(USER_CODE_CAUSES, root, earlier, job.budget)
    ):
        return None
    if root.cause is FaultCause.DATA:
        return JobFailedError(root.detail)
    when = f"in step {root.step}" if root.step else "before the first step"
    twice = ", a second time in the same way" if repeated else ""
    worker = root.worker
    return JobFailedError(
        f"the training function failed {when} on rank {root.rank} on node {worker.node} "
        f"(pid {worker.pid}){twice}: {root.detail}",
        traceback=root.traceback,
    )


def _signature(fault: Fault) -> tuple[FaultCause, int, str]:
    """Identifies the same exception at the same step; its text may contain an address or a time."""
    return fault.cause, fault.step, fault.detail.partition(":")[0]


def _exceeds_budget(
    causes: frozenset[FaultCause], root: Fault, earlier: Sequence[Fault], budget: FaultBudget
) -> bool:
    """Whether this fault exceeds the budget of its kind."""
    return len(_faults_in_window(causes, root, earlier, budget)) > budget.max_faults


def _faults_in_window(
    causes: frozenset[FaultCause], root: Fault, earlier: Sequence[Fault], budget: FaultBudget
) -> list[Fault]:
    since_s = root.at_s - budget.window_s
    members = [fault for fault in (*earlier, root) if fault.rank is not None]  # no spares
    return incidents([f for f in members if f.cause in causes and f.at_s > since_s])


def _hardware_error(root: Fault, earlier: Sequence[Fault], budget: FaultBudget) -> JobFailedError:
    counted = _faults_in_window(HARDWARE_CAUSES, root, earlier, budget)
    others = [f"\n    before that: {describe_fault(fault)}" for fault in reversed(counted[:-1])]
    fix = "the machines named here, or recovery.max_faults and recovery.fault_window_s"
    if root.cause is FaultCause.COLLECTIVE:
        fix = f"the training function, recovery.hang_timeout_s, or {fix}"
    return JobFailedError(
        describe_fault(root) + "".join(others),
        allowed=f"{budget.max_faults} hardware faults within {budget.window_s:g} s "
        "(recovery.max_faults, recovery.fault_window_s); usual causes are the kernel's "
        "out-of-memory killer, a crash in native code, and a lost node",
        fix=fix,
        traceback=root.traceback,
    )
