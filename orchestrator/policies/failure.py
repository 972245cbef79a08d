"""What a fault means for the job: to wait, to repair, or to end it. Budgets are kept by cause.

Faults come in flocks: when one worker dies, its peers' collectives fail, often before the death
itself is known. So a failed collective is not judged until a better explanation had time to come.
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
    """Why a worker is no longer training; the first names outrank the last as an explanation."""

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
"""What machines do; spent from `recovery.max_faults`."""
USER_CODE_CAUSES = frozenset({FaultCause.DATA, FaultCause.USER_CODE})
"""What the training function does; spent from as many of its own."""

_CAUSE_RANK = {cause: place for place, cause in enumerate(FaultCause)}


@dataclass(frozen=True)
class Fault:
    """One worker's fault.

    Args:
        rank: in the generation it was a member of; None for a worker that was no member.
        step: the step that was being worked on, counted from 1; 0 before the first.
        detail: the exception, or what the cluster says about the process; empty while it has not
            said anything yet.
        at_s: when the controller learnt of it.
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
    """How many faults of a kind may happen in any window of time."""

    max_faults: int
    window_s: float


@dataclass(frozen=True)
class FailureContext:
    """What a judgement depends on beside the faults.

    Args:
        steps: finished by this run of the job.
        restored: whether the generation began from a state that could be damaged.
    """

    budget: FaultBudget
    steps: int
    restored: bool


@dataclass(frozen=True)
class WaitForDetails:
    """Not clear yet: decide again when another fault comes, or when the grace is over."""


@dataclass(frozen=True)
class FailJob:
    """End the job with this error."""

    error: RayzeroError


@dataclass(frozen=True)
class RecoverJob:
    """Go on without the lost ones. `root` explains the faults."""

    root: Fault


Decision: TypeAlias = WaitForDetails | FailJob | RecoverJob


def decide(
    faults: Sequence[Fault], earlier: Sequence[Fault], job: FailureContext, *, grace_over: bool
) -> Decision:
    """Judges the faults of a generation that are not judged yet.

    Args:
        faults: in the order they became known; at least one.
        earlier: the roots of the repairs so far, the oldest first.
        grace_over: whether the wait for a better explanation has ended.
    """
    root = root_cause(faults)
    if root.cause is FaultCause.COLLECTIVE and not grace_over:
        return WaitForDetails()
    error = _fatal_error(root, earlier, job)
    if error is None:
        return RecoverJob(root)
    if root.cause in HARDWARE_CAUSES and not root.detail and not grace_over:
        return WaitForDetails()  # the user should be told what the cluster will know in a moment
    return FailJob(error)


def root_cause(faults: Sequence[Fault]) -> Fault:
    """The one that explains the others."""
    return min(faults, key=lambda fault: _CAUSE_RANK[fault.cause])


def budget_used(faults: Sequence[Fault], budget: FaultBudget, now_s: float) -> int:
    """How many of these count against the budget of hardware faults at a moment."""
    since_s = now_s - budget.window_s
    members = [one for one in faults if one.rank is not None and one.cause in HARDWARE_CAUSES]
    return len(incidents([one for one in members if one.at_s > since_s]))


def incidents(faults: Sequence[Fault]) -> list[Fault]:
    """One fault for each time that something happened to a node, however many workers it cost."""
    return list({(one.generation, one.worker.node_id): one for one in faults}.values())


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
    detail = fault.detail or "its process is gone"
    return f"{who} on node {worker.node} (pid {worker.pid}) {what} {when}: {detail}"


def _fatal_error(root: Fault, earlier: Sequence[Fault], job: FailureContext) -> RayzeroError | None:
    """The error that ends the job; None when it can go on."""
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
    again = any(
        _signature(one) == _signature(root) for one in earlier if one.cause in USER_CODE_CAUSES
    )
    if not (
        job.steps == 0 or again or _exceeds_budget(USER_CODE_CAUSES, root, earlier, job.budget)
    ):
        return None
    if root.cause is FaultCause.DATA:
        return JobFailedError(root.detail)
    when = f"in step {root.step}" if root.step else "before the first step"
    twice = ", a second time in the same way" if again else ""
    worker = root.worker
    return JobFailedError(
        f"the training function failed {when} on rank {root.rank} on node {worker.node} "
        f"(pid {worker.pid}){twice}: {root.detail}",
        traceback=root.traceback,
    )


def _signature(fault: Fault) -> tuple[FaultCause, int, str]:
    """The same exception at the same step: its text may hold an address or a time."""
    return fault.cause, fault.step, fault.detail.partition(":")[0]


def _exceeds_budget(
    kind: frozenset[FaultCause], root: Fault, earlier: Sequence[Fault], budget: FaultBudget
) -> bool:
    """Whether this fault is one more than the budget of its kind allows."""
    return len(_faults_in_window(kind, root, earlier, budget)) > budget.max_faults


def _faults_in_window(
    kind: frozenset[FaultCause], root: Fault, earlier: Sequence[Fault], budget: FaultBudget
) -> list[Fault]:
    since_s = root.at_s - budget.window_s
    members = [one for one in (*earlier, root) if one.rank is not None]  # others cost no repair
    return incidents([one for one in members if one.cause in kind and one.at_s > since_s])


def _hardware_error(root: Fault, earlier: Sequence[Fault], budget: FaultBudget) -> JobFailedError:
    counted = _faults_in_window(HARDWARE_CAUSES, root, earlier, budget)
    others = [f"\n    before that: {describe_fault(one)}" for one in reversed(counted[:-1])]
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
