"""What a fault means for the job.

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


class Cause(StrEnum):
    """Why a worker is no longer training; the first names outrank the last as an explanation."""

    PROCESS_LOST = "lost"
    CONFIG = "config"
    ENTRYPOINT = "entrypoint"
    DATA = "data"
    USER_CODE = "user"
    COLLECTIVE = "collective"


_RANKING = {cause: place for place, cause in enumerate(Cause)}


@dataclass(frozen=True)
class Fault:
    """One worker's fault.

    Args:
        step: the step that was being worked on, counted from 1; 0 before the first.
        detail: the exception, or what the cluster says about the process.
        traceback: the user's frames, for user code.
    """

    cause: Cause
    rank: int
    node: str
    pid: int
    step: int
    detail: str
    traceback: str = ""


@dataclass(frozen=True)
class Wait:
    """Not clear yet: decide again when another fault comes, or when the grace is over."""


@dataclass(frozen=True)
class Fail:
    """End the job with this error."""

    error: RayzeroError


Decision: TypeAlias = Wait | Fail


def decide(faults: Sequence[Fault], grace_over: bool) -> Decision:
    """Judges all faults of a generation so far. In this version every fault ends the job.

    Args:
        faults: in the order they became known; at least one.
        grace_over: whether the wait for a better explanation has ended.
    """
    root = min(faults, key=lambda fault: _RANKING[fault.cause])
    if root.cause is Cause.COLLECTIVE and not grace_over:
        return Wait()
    return Fail(_error(root))


def _error(fault: Fault) -> RayzeroError:
    where = f"rank {fault.rank} on node {fault.node} (pid {fault.pid})"
    when = f"in step {fault.step}" if fault.step else "before the first step"
    if fault.cause is Cause.PROCESS_LOST:
        return JobFailedError(
            f"{where} was lost {when}: {fault.detail}",
            allowed="every worker's process lives to the end of the job; usual causes are the "
            "kernel's out-of-memory killer, a crash in native code, and a lost node",
            fix="the cause, and then run the job again: this version does not repair a lost worker",
        )
    if fault.cause in (Cause.CONFIG, Cause.ENTRYPOINT):
        return JobConfigError(fault.detail, traceback=fault.traceback)
    if fault.cause is Cause.DATA:
        return JobFailedError(fault.detail)
    if fault.cause is Cause.COLLECTIVE:
        return JobFailedError(
            f"a collective failed on {where} {when}, though no worker died: {fault.detail}",
            allowed="every rank enters the same collectives, within recovery.hang_timeout_s",
            fix="the training function, or recovery.hang_timeout_s in the job file",
            traceback=fault.traceback,
        )
    return JobFailedError(
        f"the training function failed {when} on {where}: {fault.detail}",
        traceback=fault.traceback,
    )
