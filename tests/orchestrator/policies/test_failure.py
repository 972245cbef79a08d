from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.errors import JobConfigError, JobFailedError
from rayzero.orchestrator.policies.failure import (
    HARDWARE_CAUSES,
    Fault,
    FaultBudget,
    FaultCause,
    as_newcomers,
    corrected,
    decide,
    describe_fault,
    faults_in_budget,
    repeated_loss,
)
from rayzero.orchestrator.policies.placement import quarantined_nodes, restart_backoff_s
from rayzero.workers.messages import WorkerInfo
from rayzero.workers.vault import process_end


def worker(index: int, node: str = "a") -> WorkerInfo:
    return WorkerInfo(index, node, f"node-{node}", "10.0.0.1", 4710 + index)


LOST = Fault(FaultCause.PROCESS_LOST, worker(1, "b"), 1, 8, "it was killed", 100.0, 1)
DEVICE = replace(LOST, cause=FaultCause.DEVICE, detail="CUDA error: uncorrectable ECC error")
COLLECTIVE = Fault(FaultCause.COLLECTIVE, worker(0), 0, 8, "Connection closed", 100.0, 1)
USER = Fault(FaultCause.USER_CODE, worker(2, "c"), 2, 3, "ValueError: hole", 100.0, 1)
USER = replace(USER, traceback="user frames")
STATE = Fault(FaultCause.STATE, worker(0), 0, 0, "step-8 is damaged", 100.0, 1)


def of_worker_0(cause: FaultCause, detail: str) -> Fault:
    return Fault(cause, worker(0), 0, 0, detail)


NEWCOMER = Fault(FaultCause.NEWCOMER, worker(1), 1, 8, "ZeroDivisionError", 100.0, 3)
BUDGET = FaultBudget(max_faults=2, window_s=50.0)


def decided(
    *faults: Fault,
    earlier: tuple[Fault, ...] = (),
    budget: FaultBudget = BUDGET,
    steps: int = 7,
    restored_step: int | None = 6,
    grace_over: bool = False,
) -> Fault | RayzeroError | None:
    return decide(
        faults, earlier, budget, steps=steps, restored_step=restored_step, grace_over=grace_over
    )


def error(decision: Fault | RayzeroError | None) -> RayzeroError:
    assert isinstance(decision, RayzeroError)
    return decision


def test_fault_description_has_rank_node_pid_and_cause():
    assert (
        describe_fault(LOST)
        == "rank 1 on node node-b (pid 4711) was lost after step 7: it was killed"
    )
    unknown = replace(LOST, rank=None, step=0, detail="")
    assert describe_fault(unknown) == (
        "worker 1 on node node-b (pid 4711) was lost before the first step: its process ended"
    )


@pytest.mark.parametrize(
    ("faults", "grace_over", "decision"),
    [
        ((LOST,), False, LOST),
        ((COLLECTIVE,), False, None),
        ((COLLECTIVE,), True, COLLECTIVE),
        *((order, False, LOST) for order in permutations((LOST, COLLECTIVE, USER))),
        ((USER, COLLECTIVE, DEVICE), False, DEVICE),  # the error of a kernel fails the others'
        ((COLLECTIVE, USER, DEVICE), False, DEVICE),  # collectives, and perhaps its function
    ],
)
def test_failed_collective_waits_for_another_cause_in_any_order(
    faults: tuple[Fault, ...], grace_over: bool, decision: Fault | None
):
    assert decided(*faults, grace_over=grace_over) == decision


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        (
            of_worker_0(FaultCause.CONFIG, "the sizes disagree"),
            JobConfigError,
            "the sizes disagree",
        ),
        (of_worker_0(FaultCause.ENTRYPOINT, "no such name"), JobConfigError, "no such name"),
        (of_worker_0(FaultCause.DATA, "no such file"), JobFailedError, "no such file"),
        (STATE, JobFailedError, "step-8 is damaged"),  # where none was restored
        (
            USER,
            JobFailedError,
            "the training function failed in step 3 on rank 2 on node node-c (pid 4712): "
            "ValueError: hole\n\nuser frames",
        ),
        (
            replace(USER, step=0),
            JobFailedError,
            "the training function failed before the first step on rank 2 on node node-c (pid "
            "4712): ValueError: hole\n\nuser frames",
        ),
    ],
)
def test_error_before_the_first_step(fault: Fault, kind: type[RayzeroError], text: str):
    failure = error(decided(fault, steps=0, restored_step=2 if fault is USER else None))
    assert (type(failure), str(failure)) == (kind, text)
    assert decided(STATE) == STATE, "a state that was restored may be an older one"
    unreported = replace(USER, step=4)  # no report of the step before has arrived
    assert decided(unreported, steps=0, restored_step=2) is unreported


def hardware(
    count: int, at_s: float = 90.0, cause: FaultCause = FaultCause.PROCESS_LOST
) -> tuple[Fault, ...]:
    return tuple(
        Fault(cause, worker(index, f"n{index}"), index, index + 1, "gone", at_s, index)
        for index in range(count)
    )


@pytest.mark.parametrize(
    ("earlier", "repaired"),
    [
        (hardware(1), True),
        (hardware(2), False),
        (hardware(2, at_s=50.0), True),  # outside the window
        (hardware(5, cause=FaultCause.PREEMPTED), True),
        (hardware(5, cause=FaultCause.STATE), True),
        ((replace(USER, step=1), replace(USER, step=2)), True),  # another budget
        (hardware(1, cause=FaultCause.HANG) + hardware(2)[1:], False),
        (tuple(replace(fault, rank=None) for fault in hardware(5)), True),  # of spares
        (tuple(replace(fault, worker=worker(9, "x"), generation=1) for fault in hardware(5)), True),
    ],
)
def test_hardware_fault_budget(earlier: tuple[Fault, ...], repaired: bool):
    decision = decided(replace(LOST, generation=9), earlier=earlier)
    assert isinstance(decision, Fault if repaired else RayzeroError)


def test_broken_device_is_hardware():
    assert decided(USER, COLLECTIVE, DEVICE, steps=0) == DEVICE
    assert decided(DEVICE, replace(LOST, worker=worker(0))) != DEVICE
    decision = decided(replace(DEVICE, generation=9), earlier=hardware(2))
    assert "2 hardware faults" in str(error(decision))
    assert "cannot use its device any more" in describe_fault(DEVICE)
    faults = [replace(DEVICE, generation=number) for number in (1, 2, 3)]
    assert quarantined_nodes(faults, ["a", "b"], 50.0, 110.0) == {"b"}


def test_preemption_does_not_count_as_fault():
    preempted = replace(LOST, cause=FaultCause.PREEMPTED)
    assert decided(preempted, earlier=hardware(9), budget=FaultBudget(0, 50)) == preempted


def test_exhausted_budget_lists_faults_and_settings():
    text = str(error(decided(LOST, earlier=hardware(2), grace_over=True)))
    assert text.startswith(
        "rank 1 on node node-b (pid 4711) was lost after step 7: it was killed\n"
    )
    assert "before that: rank 1 on node node-n1 (pid 4711) was lost after step 1: gone" in text
    assert "2 hardware faults within 50 s (recovery.max_faults, recovery.fault_window_s)" in text


def test_fatal_error_waits_for_cause_reported_by_cluster():
    unknown = replace(LOST, detail="")
    assert decided(unknown, budget=FaultBudget(0, 50)) is None
    assert decided(unknown) == unknown  # a repair does not wait
    assert "its process ended" in str(
        error(decided(unknown, budget=FaultBudget(0, 50), grace_over=True))
    )


def test_lost_workers_of_a_node_count_as_one_fault():
    faults = [replace(LOST, worker=worker(index, "b")) for index in range(8)]
    assert len(faults_in_budget(faults, HARDWARE_CAUSES, BUDGET, 100.0)) == 1
    faults.append(replace(LOST, generation=2))
    assert len(faults_in_budget(faults, HARDWARE_CAUSES, BUDGET, 100.0)) == 2


def faults_on(node: str, *times_s: float) -> list[Fault]:
    return [
        replace(LOST, worker=worker(index, node), at_s=at_s, generation=index)
        for index, at_s in enumerate(times_s)
    ]


@pytest.mark.parametrize(
    ("count", "delay"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 4), (7, 32), (8, 60), (20, 60)]
)
def test_restart_backoff_grows_with_faults_of_node(count: int, delay: float):
    faults = faults_on("b", *range(100, 100 + count)) + faults_on("c", 100, 101, 102)
    assert restart_backoff_s(faults, "b", 1000.0, 200.0) == delay
    assert restart_backoff_s(faults, "b", 50.0, 500.0) == 0


def test_node_with_three_faults_is_quarantined_unless_last():
    faults = faults_on("b", 1, 2, 3) + faults_on("a", 1, 2)
    assert quarantined_nodes(faults, ["a", "b"], 100.0, 10.0) == {"b"}
    assert quarantined_nodes(faults, ["b"], 100.0, 10.0) == frozenset()
    assert quarantined_nodes(faults, ["a", "b"], 5.0, 7.0) == frozenset()


@pytest.mark.parametrize("kind", [JobFailedError, JobConfigError])
def test_errors_survive_pickling(kind: type[JobFailedError] | type[JobConfigError]):
    before = kind("seen", "allowed", "fix", "frames")
    after = pickle.loads(pickle.dumps(before))
    assert type(after) is kind
    assert (str(after), after.traceback) == (str(before), "frames")


def repeated(fault: Fault, count: int) -> list[Fault]:
    """Faults of rank 1 in step 8, each in a generation of its own."""
    return [
        replace(fault, generation=generation, trained_s=2.0, at_s=100.0 + generation)
        for generation in range(1, count + 1)
    ]


LOSSES = repeated(LOST, 3)
HUNG = replace(LOST, cause=FaultCause.HANG, place="data.py:12, in __getitem__", traceback="frames")
EXITED = replace(LOST, rank=2, worker=worker(2), detail=process_end._describe(0))
BAD_DATA = replace(USER, cause=FaultCause.DATA, traceback="")
EARLY = Fault(FaultCause.EARLY_RETURN, worker(1), 1, 3, "it returned: too early", 100.0, 1)
REPEATED: dict[str, tuple[list[Fault], list[dict[str, Any]], list[str]]] = {
    "loss": (
        LOSSES,
        [{"step": 9}, {"rank": 0}, {"trained_s": 9.0}, {"cause": FaultCause.NODE_LOST}],
        ["rank 1 ended in step 8 3 times in a row", "os._exit"],
    ),
    "device": (
        repeated(DEVICE, 3),
        [],
        ["the device of rank 1 failed in step 8 3 times in a row", "CUDA_LAUNCH_BLOCKING"],
    ),
    "hang": (  # whichever rank the sample falls to, and however long it trained before
        [replace(HUNG, rank=0, trained_s=500.0), *repeated(HUNG, 3)[1:]],
        [{"step": 9}, {"place": ""}, {"place": "data.py:13, in __getitem__"}],
        ["hung in step 8 3 times in a row at data.py:12, in __getitem__", "hang_timeout_s"],
    ),
    "exit": (  # also if ranks just go, so that no rank does it twice
        [EXITED, replace(EXITED, rank=1, worker=worker(1), generation=2, trained_s=0.1)],
        [{"step": 9}, {"detail": "its process exited with code 1"}, {"generation": 1}],
        ["rank 2 on node node-a (pid 4712) and then rank 1 on node", "with code 0 in step 8"],
    ),
    "user": (
        [USER, replace(USER, detail="ValueError: another hole", rank=0)],
        [{"step": 4}, {"detail": "KeyError: 3"}],
        ["a second time in the same way"],
    ),
    "data": (  # the first one is the cause: what is read after a repair is other data
        [replace(BAD_DATA, detail=f"{name} is damaged") for name in "ab"],
        [{"step": 4}],
        ["a is damaged"],
    ),
    "early return": ([EARLY, replace(EARLY, generation=2)], [], ["it returned"]),
}


@pytest.mark.parametrize(("faults", "unlike", "words"), REPEATED.values(), ids=REPEATED)
def test_fault_that_repeats_is_the_functions(
    faults: list[Fault], unlike: list[dict[str, Any]], words: list[str]
):
    """Unless it is unlike those before in one of these."""
    *earlier, last = faults
    budget = FaultBudget(max_faults=20, window_s=500.0)
    before = decided(earlier[-1], COLLECTIVE, earlier=tuple(earlier[:-1]), budget=budget)
    assert before is earlier[-1]
    failure = error(decided(last, earlier=tuple(earlier), budget=budget))
    assert [word for word in words if word not in str(failure)] == []
    assert failure.traceback == last.traceback
    for change in unlike:
        other = replace(last, **change)
        assert decided(other, earlier=tuple(earlier), budget=budget) is other


def test_equal_losses_are_recognized_once_the_survivors_told_their_step():
    *earlier, third = LOSSES
    history = [*earlier, replace(third, step=4)]
    assert repeated_loss(history, 3) is None
    told = corrected(history, 3, 8)
    assert told == [*earlier, third]
    assert "ended in step 8 3 times in a row" in str(repeated_loss(told, 3))
    assert corrected(history, 3, 2) == history, "the step never goes back"


@pytest.mark.parametrize(
    ("entered_in", "change", "cause"),
    [
        ({0: 1, 1: 3}, {}, FaultCause.NEWCOMER),
        ({0: 1, 1: 3}, {"cause": FaultCause.CONFIG}, FaultCause.NEWCOMER),
        ({0: 1, 1: 3}, {"cause": FaultCause.COLLECTIVE}, FaultCause.COLLECTIVE),
        ({0: 1, 1: 3}, {"step": 9}, FaultCause.USER_CODE),  # it has finished a step
        ({0: 1, 1: 2}, {}, FaultCause.USER_CODE),  # it has stayed in its loop before
        ({0: 3, 1: 3}, {}, FaultCause.USER_CODE),  # all are new
    ],
)
def test_failure_of_a_new_function_is_told_from_one_of_all(
    entered_in: dict[int, int], change: dict[str, Any], cause: FaultCause
):
    fault = replace(NEWCOMER, cause=FaultCause.USER_CODE)
    assert as_newcomers(replace(fault, **change), (), entered_in, restored_step=7).cause is cause
    earlier = (replace(fault, generation=2, worker=worker(0)),)  # not only in a new function
    known = as_newcomers(fault, earlier, entered_in, restored_step=7)
    assert known.cause is FaultCause.USER_CODE


def test_failure_of_a_new_function_ends_no_job():
    budget, earlier = FaultBudget(0, 100.0), (NEWCOMER, NEWCOMER)
    assert decided(NEWCOMER, COLLECTIVE, earlier=earlier, budget=budget) is NEWCOMER
    assert "is new, and raised an exception in step 8" in describe_fault(NEWCOMER)
