"""The failure policy: wait for details, recover, or fail the job. Budgets are kept by cause.

Faults arrive in groups: when a worker dies, its peers' collectives fail, often before the death
itself is reported. So a failed collective is decided only after a grace period.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

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
LOSS_CAUSES = HARDWARE_CAUSES - {FaultCause.COLLECTIVE}
"""Causes that point to a node; a failed collective does not."""
USER_CODE_CAUSES = frozenset({FaultCause.DATA, FaultCause.USER_CODE})
"""Causes in the training function; they have a budget of their own, of the same size."""


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


def decide(
    faults: Sequence[Fault],
    earlier: Sequence[Fault],
    budget: FaultBudget,
    *,
    steps: int,
    restored: bool,
    grace_over: bool,
) -> Fault | RayzeroError | None:
    """Decides about the pending faults of a generation.

    Args:
        faults: in the order of detection; at least one.
        earlier: the faults recovered from so far, the oldest first.
        steps: steps finished by this run of the job.
        restored: whether the generation loaded a state, which may be damaged.
        grace_over: whether the wait for a better explanation has ended.

    Returns:
        The root cause, to recover from; or the error that fails the job; or None: decide again when
        another fault arrives, or when the grace period is over.
    """
    root = root_cause(faults)
    if root.cause is FaultCause.COLLECTIVE and not grace_over:
        return None
    error = _fatal_error(root, earlier, budget, steps, restored)
    if error is not None and root.cause in HARDWARE_CAUSES and not (root.detail or grace_over):
        return None  # the cluster is about to report details for the error message
    return error or root


def root_cause(faults: Sequence[Fault]) -> Fault:
    """The fault that explains the others."""
    precedence = list(FaultCause)
    return min(faults, key=lambda fault: precedence.index(fault.cause))


def faults_in_budget(
    faults: Iterable[Fault], causes: Collection[FaultCause], budget: FaultBudget, now_s: float
) -> list[Fault]:
    """The faults that count against the budget of these causes: those of members."""
    members = [fault for fault in faults if fault.rank is not None]
    return incidents(members, causes, now_s - budget.window_s)


def incidents(
    faults: Iterable[Fault], causes: Collection[FaultCause], since_s: float
) -> list[Fault]:
    """One fault per generation and node, however many of its workers were lost."""
    return list(
        {
            (fault.generation, fault.worker.node_id): fault
            for fault in faults
            if fault.cause in causes and fault.at_s > since_s
        }.values()
    )


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


def _fatal_error(
    root: Fault, earlier: Sequence[Fault], budget: FaultBudget, steps: int, restored: bool
) -> RayzeroError | None:
    """The error that fails the job; None if it can continue."""
    if root.cause in (FaultCause.CONFIG, FaultCause.ENTRYPOINT):
        return JobConfigError(root.detail, traceback=root.traceback)
    if root.cause is FaultCause.STATE:
        return None if restored else JobFailedError(root.detail)
    if root.cause is FaultCause.PREEMPTED:
        return None
    causes = USER_CODE_CAUSES if root.cause in USER_CODE_CAUSES else HARDWARE_CAUSES
    counted = faults_in_budget((*earlier, root), causes, budget, root.at_s)
    exceeded = len(counted) > budget.max_faults
    if causes is HARDWARE_CAUSES:
        return _hardware_error(root, counted, budget) if exceeded else None
    repeated = _signature(root) in map(_signature, earlier)
    return _user_code_error(root, repeated) if steps == 0 or repeated or exceeded else None


def _user_code_error(root: Fault, repeated: bool) -> JobFailedError:
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


def _hardware_error(root: Fault, counted: Sequence[Fault], budget: FaultBudget) -> JobFailedError:
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
