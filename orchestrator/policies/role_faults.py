"""Decides what a fault of a role's worker means: start it again, or fail the job. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.errors import JobConfigError, JobFailedError
from rayzero.orchestrator.policies.failure import (
    HARDWARE_CAUSES,
    USER_CODE_CAUSES,
    Fault,
    FaultBudget,
    FaultCause,
)

EQUAL_FAULTS = 3
"""A function that raises the same exception this many times in a row will raise it again."""


def decide(role: str, faults: Sequence[Fault], budget: FaultBudget) -> RayzeroError | None:
    """Returns the error that fails the job; None if the worker is started again.

    Args:
        role: the name of the role.
        faults: the faults of the role's workers so far, the newest last; at least one. A fault's
            rank is the worker's number in the role, its step is the last one that the worker
            finished.
        budget: `roles.NAME.recovery`.
    """
    newest = faults[-1]
    if newest.cause in (FaultCause.CONFIG, FaultCause.ENTRYPOINT):
        detail = f"role {role}: {newest.detail}"
        return JobConfigError(detail, traceback=newest.traceback)
    if newest.cause is FaultCause.PREEMPTED:
        return None
    last = [(fault.cause, fault.detail.partition(":")[0]) for fault in faults[-EQUAL_FAULTS:]]
    raised = newest.cause in USER_CODE_CAUSES
    if raised and len(last) == EQUAL_FAULTS and len(set(last)) == 1:
        return JobFailedError(
            f"the function of role {role} failed {EQUAL_FAULTS} times in a row in the same way, at "
            f"last in {describe_worker(role, newest)}: {newest.detail}",
            traceback=newest.traceback,
        )
    causes = USER_CODE_CAUSES if raised else HARDWARE_CAUSES
    since_s = newest.at_s - budget.window_s
    recent = [fault for fault in faults if fault.cause in causes and fault.at_s > since_s]
    if len(recent) <= budget.max_faults:
        return None
    return JobFailedError(
        f"role {role} had {len(recent)} faults within {budget.window_s:g} s, the last in "
        f"{describe_worker(role, newest)}: {newest.detail}",
        allowed=f"up to {budget.max_faults} (roles.{role}.recovery.max_faults)",
        fix=f"see the job's log for their causes, or raise roles.{role}.recovery.max_faults",
        traceback=newest.traceback,
    )


def describe_worker(role: str, fault: Fault) -> str:
    """Returns `rollout 1 on node a (pid 7)`."""
    worker = fault.worker
    pid = f" (pid {worker.pid})" if worker.pid else ""  # none: it did not start
    return f"{role} {fault.rank} on node {worker.node}{pid}"


def too_few_error(
    role: str, ready: int, least: int, waited_s: float, returned: int
) -> JobFailedError:
    """Returns the error of a role that had fewer than the least number of workers for too long."""
    ended = f"; in {returned} more the function has returned" if returned else ""
    return JobFailedError(
        f"role {role} has {ready} of at least {least} workers, and has had too few for "
        f"{waited_s:g} s{ended}",
        allowed=f"at least {least} (roles.{role}.workers.min)",
        fix=f"roles.{role}.workers.min or .start_timeout_s in the job file, or the size of the "
        "cluster",
    )
