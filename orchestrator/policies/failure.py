"""The failure policy: wait for details, recover, or fail the job. Budgets are kept by cause.

Faults arrive in groups: when a worker dies, its peers' collectives fail, often before the death
itself is reported. So a failed collective is decided only after a grace period.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.errors import JobConfigError, JobFailedError
from rayzero.workers.messages import WorkerInfo
from rayzero.workers.vault.process_end import EXITED


class FaultCause(StrEnum):
    """Why a worker no longer trains, in order of precedence as the root cause."""

    NODE_LOST = "node"
    PROCESS_LOST = "lost"
    HANG = "hang"
    DEVICE = "device"
    PREEMPTED = "preempted"
    CONFIG = "config"
    ENTRYPOINT = "entrypoint"
    STATE = "state"
    DATA = "data"
    EARLY_RETURN = "early_return"
    USER_CODE = "user"
    NEWCOMER = "newcomer"
    COLLECTIVE = "collective"


HARDWARE_CAUSES = frozenset(
    {
        FaultCause.NODE_LOST,
        FaultCause.PROCESS_LOST,
        FaultCause.HANG,
        FaultCause.DEVICE,
        FaultCause.COLLECTIVE,
    }
)
"""Causes outside the training function; they use the budget `recovery.max_faults`."""
LOSS_CAUSES = HARDWARE_CAUSES - {FaultCause.COLLECTIVE}
"""Causes that point to a node; a failed collective does not."""
UNSEEN_CAUSES = frozenset({FaultCause.NODE_LOST, FaultCause.PROCESS_LOST, FaultCause.PREEMPTED})
"""Causes that the worker itself does not report: reports of its last steps may be lost."""
USER_CODE_CAUSES = frozenset({FaultCause.DATA, FaultCause.EARLY_RETURN, FaultCause.USER_CODE})
"""Causes in the training function; they have a budget of their own, of the same size."""
NEWCOMERS_CAUSES = USER_CODE_CAUSES | {FaultCause.CONFIG, FaultCause.ENTRYPOINT}
"""Causes that end no job if only new workers have them, while others train."""
SAME_LOSSES = 3
"""Number of equal losses in a row that fail the job. A process or a device that is lost so often on
the same rank in the same step, each time after about the same time, is lost because of what it
computes there, not because of its machine. A hang that is so often in the same step and line of the
function is the function's fault."""


DETECTION_S = 0.5
"""By how much the detection of equal losses may differ in time."""


@dataclass(frozen=True)
class Fault:
    """One worker's fault.

    Args:
        rank: in the generation it was a member of; None for a worker that was no member.
        step: the step in progress, counted from 1; 0 before the first.
        detail: the exception, or the cluster's report on the process; empty until it arrives.
        at_s: when the controller detected it.
        traceback: the user's frames, for user code and hangs.
        trained_s: for how long its generation had been training.
        place: the line of the user's code in which it hung; empty if it hung elsewhere.
    """

    cause: FaultCause
    worker: WorkerInfo
    rank: int | None
    step: int
    detail: str
    at_s: float = 0.0
    generation: int = 0
    traceback: str = ""
    trained_s: float = 0.0
    place: str = ""


@dataclass(frozen=True)
class FaultBudget:
    """The number of faults of a kind that may happen within any window of `window_s`."""

    max_faults: int
    window_s: float


def decide(
    faults: Sequence[Fault],
    earlier: Sequence[Fault],
    budget: FaultBudget,
    *,
    steps: int,
    restored_step: int | None,
    grace_over: bool,
) -> Fault | RayzeroError | None:
    """Decides about the pending faults of a generation.

    Args:
        faults: in the order of detection; at least one.
        earlier: the faults recovered from so far, the oldest first.
        steps: steps finished by this run of the job, as far as they were reported.
        restored_step: step of the state that the generation loaded, which may be damaged; None if
            it loaded none.
        grace_over: whether the wait for a better explanation has ended.

    Returns:
        The root cause, to recover from; or the error that fails the job; or None: decide again when
        another fault arrives, or when the grace period is over.
    """
    root = root_cause(faults)
    if root.cause is FaultCause.COLLECTIVE and not grace_over:
        return None
    error = _fatal_error(root, earlier, budget, steps, restored_step)
    if error is not None and root.cause in HARDWARE_CAUSES and not (root.detail or grace_over):
        return None  # the cluster is about to report details for the error message
    return error or root


def as_newcomers(
    fault: Fault, earlier: Sequence[Fault], called_in: Mapping[int, int], restored_step: int
) -> Fault:
    """Returns the fault, with the cause NEWCOMER if it ends no job. That is so if the function was
    called in this generation while others stayed in their loops, failed before its first step
    ended, and failed in another way than functions of workers that were not new.

    Args:
        earlier: the faults recovered from so far.
        called_in: by member, the generation in which its function was called.
        restored_step: finished steps when the generation began.
    """
    is_new = fault.cause in NEWCOMERS_CAUSES and called_in[fault.worker.index] == fault.generation
    if not is_new or fault.step > restored_step + 1:
        return fault
    others_stay = any(generation < fault.generation for generation in called_in.values())
    is_known = _signature(fault) in map(_signature, earlier)
    return replace(fault, cause=FaultCause.NEWCOMER) if others_stay and not is_known else fault


def root_cause(faults: Sequence[Fault]) -> Fault:
    """Returns the fault that explains the others."""
    precedence = list(FaultCause)
    return min(faults, key=lambda fault: precedence.index(fault.cause))


def faults_in_budget(
    faults: Iterable[Fault], causes: Collection[FaultCause], budget: FaultBudget, now_s: float
) -> list[Fault]:
    """Returns the faults of members with these causes that count against the budget."""
    members = [fault for fault in faults if fault.rank is not None]
    return incidents(members, causes, now_s - budget.window_s)


def incidents(
    faults: Iterable[Fault], causes: Collection[FaultCause], since_s: float
) -> list[Fault]:
    """Returns one fault per generation and node, however many workers of the node were lost."""
    return list(
        {
            (fault.generation, fault.worker.node_id): fault
            for fault in faults
            if fault.cause in causes and fault.at_s > since_s
        }.values()
    )


def describe_fault(fault: Fault) -> str:
    """Returns `rank 1 on node a (pid 7) was lost after step 7: it was killed`.

    A process that is gone may not have reported its last steps: the text says what is known.
    """
    worker = fault.worker
    who = f"worker {worker.index}" if fault.rank is None else f"rank {fault.rank}"
    when = f"in step {fault.step}" if fault.step else "before the first step"
    if fault.cause in UNSEEN_CAUSES and fault.step > 1:
        when = f"after step {fault.step - 1}"
    what = {
        FaultCause.NODE_LOST: "was lost with its node",
        FaultCause.PROCESS_LOST: "was lost",
        FaultCause.PREEMPTED: "was lost with its node, which was being drained,",
        FaultCause.HANG: "hung",
        FaultCause.DEVICE: "cannot use its device any more, and was ended,",
        FaultCause.COLLECTIVE: "had a collective fail, though no worker died,",
        FaultCause.STATE: "could not load the state",
        FaultCause.EARLY_RETURN: "returned too early",
        FaultCause.NEWCOMER: "is new, and raised an exception",
    }.get(fault.cause, "raised an exception")
    detail = fault.detail or "its process ended"
    pid = f" (pid {worker.pid})" if worker.pid else ""  # none: it did not start
    return f"{who} on node {worker.node}{pid} {what} {when}: {detail}"


def corrected(history: Sequence[Fault], generation: int, step: int) -> list[Fault]:
    """Returns the history with the right step of that generation's losses: the survivors have left,
    and have reported in which step all were."""
    return [
        replace(fault, step=step)
        if fault.generation == generation
        and fault.rank is not None
        and fault.cause in UNSEEN_CAUSES
        and fault.step < step
        else fault
        for fault in history
    ]


def repeated_loss(history: Sequence[Fault], generation: int) -> JobFailedError | None:
    """Returns the error if a loss of that generation is equal to the losses before."""
    earlier = [fault for fault in history if fault.generation != generation]
    for fault in history:
        if fault.generation == generation and _is_same_loss(fault, earlier):
            return _same_loss_error(fault)
    return None


def _fatal_error(
    root: Fault,
    earlier: Sequence[Fault],
    budget: FaultBudget,
    steps: int,
    restored_step: int | None,
) -> RayzeroError | None:
    """Returns the error that fails the job; None if the job can continue."""
    if root.cause in (FaultCause.CONFIG, FaultCause.ENTRYPOINT):
        return JobConfigError(root.detail, traceback=root.traceback)
    if root.cause is FaultCause.STATE:
        return JobFailedError(root.detail) if restored_step is None else None
    if root.cause in (FaultCause.PREEMPTED, FaultCause.NEWCOMER):
        return None
    causes = USER_CODE_CAUSES if root.cause in USER_CODE_CAUSES else HARDWARE_CAUSES
    counted = faults_in_budget((*earlier, root), causes, budget, root.at_s)
    exceeded = len(counted) > budget.max_faults
    if causes is HARDWARE_CAUSES:
        if exits := _equal_exits(root, earlier):
            return _equal_exits_error(exits)
        if _is_same_loss(root, earlier):
            return _same_loss_error(root)
        return _hardware_error(root, counted, budget) if exceeded else None
    first = next((fault for fault in earlier if _signature(fault) == _signature(root)), None)
    # An exception in the second step may arrive before the reports of the first.
    is_first_step = steps == 0 and root.step <= (restored_step or 0) + 1
    return _user_code_error(root, first) if is_first_step or first or exceeded else None


def _user_code_error(root: Fault, first: Fault | None) -> JobFailedError:
    """Returns the error of a function or its data.

    Args:
        first: the earlier fault that `root` repeats.
    """
    if root.cause is FaultCause.DATA:
        # After a repair, new workers may only find that the data is not the data of the state.
        return JobFailedError((first or root).detail)
    when = f"in step {root.step}" if root.step else "before the first step"
    twice = ", a second time in the same way" if first else ""
    worker = root.worker
    return JobFailedError(
        f"the training function failed {when} on rank {root.rank} on node {worker.node} "
        f"(pid {worker.pid}){twice}: {root.detail}",
        traceback=root.traceback,
    )


def _signature(fault: Fault) -> tuple[FaultCause, int, str]:
    """Returns what identifies the same exception at the same step. Only the beginning of its text
    counts: the rest may contain an address or a time. The text of a data error does not count,
    because it may name the file that was read first."""
    is_data = fault.cause is FaultCause.DATA
    return fault.cause, fault.step, "" if is_data else fault.detail.partition(":")[0]


def start_error(failures: Sequence[Fault], budget: FaultBudget) -> JobFailedError | None:
    """Returns the error if too many workers ended while they started, in a job without a
    generation.

    Args:
        failures: all faults so far, the newest last; at least one.
    """
    newest = failures[-1]
    recent = [fault for fault in failures if fault.at_s > newest.at_s - budget.window_s]
    return _hardware_error(newest, recent, budget) if len(recent) > budget.max_faults else None


def _equal_exits(root: Fault, earlier: Sequence[Fault]) -> list[Fault]:
    """Returns the processes that exited with code 0 in this step, if there were several: what they
    run ended them, on whichever rank. A cluster that ends a process sends a signal, or makes it
    exit with another code."""
    step, code = root.step, f"{EXITED}0"
    exits = [fault for fault in (*earlier, root) if (fault.detail, fault.step) == (code, step)]
    generations = {fault.generation for fault in exits}
    return exits if step and root in exits and len(generations) > 1 else []


def _equal_exits_error(exits: Sequence[Fault]) -> JobFailedError:
    ranks = " and then ".join(
        f"rank {f.rank} on node {f.worker.node} (pid {f.worker.pid})" for f in exits
    )
    return JobFailedError(
        f"the processes of {ranks} exited with code 0 in step {exits[-1].step}, while the other "
        "ranks went on: the training function, or what it calls, ends its process there",
        allowed="a function or a script that ends on every rank after the same step",
        fix="remove os._exit and the like in the training function; the worker's log has its last "
        "lines",
    )


def _is_same_loss(root: Fault, earlier: Sequence[Fault]) -> bool:
    """Returns whether all recent losses resemble this one; at most one loss of a generation
    counts."""
    lost = root.cause in (FaultCause.PROCESS_LOST, FaultCause.DEVICE)
    if not (lost or root.place) or not root.step or root.rank is None:
        return False
    members = {fault.generation: fault for fault in earlier if fault.rank is not None}
    last = [*list(members.values())[1 - SAME_LOSSES :], root]
    if len(last) < SAME_LOSSES or len({(f.cause, f.step) for f in last}) > 1:
        return False
    if root.cause is FaultCause.HANG:  # with another world size the same sample is another rank's
        return len({fault.place for fault in last}) == 1
    if len({fault.rank for fault in last}) > 1:
        return False
    times_s = [fault.trained_s for fault in last]
    return max(times_s) <= 1.5 * min(times_s) + DETECTION_S


def _same_loss_error(root: Fault) -> JobFailedError:
    if root.cause is FaultCause.HANG:
        return JobFailedError(
            f"the training function hung in step {root.step} {SAME_LOSSES} times in a row at "
            f"{root.place}: {root.detail}",
            allowed="code that continues; usual causes are a lock, an endless loop, and a read of "
            "a file or of the network without a timeout",
            fix="correct the code there, or set recovery.hang_timeout_s if it only takes longer",
            traceback=root.traceback,
        )
    what, survivor = f"process of rank {root.rank} ended", "a process that survives its steps"
    causes = "os._exit, a crash in native code, and the kernel's out-of-memory killer"
    if root.cause is FaultCause.DEVICE:
        what, survivor = f"device of rank {root.rank} failed", "kernels that do not break it"
        causes = "an index out of range, and custom kernels (CUDA_LAUNCH_BLOCKING=1 shows which)"
    return JobFailedError(
        f"the {what} in step {root.step} {SAME_LOSSES} times in a row, "
        f"at last on node {root.worker.node} (pid {root.worker.pid}): "
        f"{root.detail or 'its process ended'}",
        allowed=f"{survivor}; usual causes are {causes}",
        fix="correct the training function; the worker's log has its last lines",
        traceback=root.traceback,
    )


def _hardware_error(root: Fault, counted: Sequence[Fault], budget: FaultBudget) -> JobFailedError:
    others = [f"\n    before that: {describe_fault(fault)}" for fault in reversed(counted[:-1])]
    fix = "the machines named here, or recovery.max_faults and recovery.fault_window_s"
    if root.cause is FaultCause.COLLECTIVE:
        fix = f"the training function, recovery.patience_s, or {fix}"
    return JobFailedError(
        describe_fault(root) + "".join(others),
        allowed=f"{budget.max_faults} hardware faults within {budget.window_s:g} s "
        "(recovery.max_faults, recovery.fault_window_s); usual causes are the kernel's "
        "out-of-memory killer, a crash in native code, and a lost node",
        fix=fix,
        traceback=root.traceback,
    )
