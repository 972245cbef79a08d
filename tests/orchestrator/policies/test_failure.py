from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from rayzero.engine.errors import ConfigError, RayzeroError
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
COLLECTIVE = Fault(
    FaultCause.COLLECTIVE, worker(0), 0, 8, "Connection closed", 100.0, 1, traceback="frames"
)
USER = Fault(
    FaultCause.USER_CODE,
    worker(2, "c"),
    2,
    3,
    "ValueError: hole",
    100.0,
    1,
    traceback="user frames",
)
STATE = Fault(FaultCause.STATE, worker(0), 0, 0, "step-8 is damaged", 100.0, 1)
BUDGET = FaultBudget(max_faults=2, window_s=50.0)


def decided(
    *faults: Fault,
    earlier: tuple[Fault, ...] = (),
    budget: FaultBudget = BUDGET,
    steps: int = 7,
    restored: bool = True,
    grace_over: bool = False,
) -> Fault | RayzeroError | None:
    return decide(faults, earlier, budget, steps=steps, restored=restored, grace_over=grace_over)


def error(decision: Fault | RayzeroError | None) -> RayzeroError:
    assert isinstance(decision, RayzeroError)
    return decision


def test_lost_worker_is_repaired():
    assert decided(LOST) == LOST


def test_fault_description_has_rank_node_pid_and_cause():
    assert (
        describe_fault(LOST)
        == "rank 1 on node node-b (pid 4711) was lost after step 7: it was killed"
    )
    unknown = replace(LOST, rank=None, step=0, detail="")
    assert describe_fault(unknown) == (
        "worker 1 on node node-b (pid 4711) was lost before the first step: its process ended"
    )


def test_failed_collective_waits_for_another_cause():
    assert decided(COLLECTIVE) is None
    assert decided(COLLECTIVE, LOST) == LOST
    assert decided(COLLECTIVE, grace_over=True) == COLLECTIVE


@pytest.mark.parametrize("order", list(permutations((LOST, COLLECTIVE, USER))))
def test_order_of_arrival_does_not_matter(order: tuple[Fault, ...]):
    assert decided(*order) == LOST


@pytest.mark.parametrize("cause", [FaultCause.CONFIG, FaultCause.ENTRYPOINT])
def test_config_error_of_worker_keeps_its_message(cause: FaultCause):
    failure = error(decided(Fault(cause, worker(0), 0, 0, "the batch sizes disagree")))
    assert isinstance(failure, ConfigError)
    assert str(failure) == "the batch sizes disagree"


def test_user_error_before_first_step_fails_job():
    text = str(error(decided(USER, steps=0)))
    assert text.startswith(
        "the training function failed in step 3 on rank 2 on node node-c (pid 4712): ValueError"
    )
    assert text.endswith("user frames")
    assert "before the first step" in str(error(decided(replace(USER, step=0), steps=0)))


def test_repeated_user_error_at_same_step_fails_job():
    assert decided(USER) == USER
    second = replace(USER, detail="ValueError: another hole", rank=0)
    assert "a second time in the same way" in str(error(decided(second, earlier=(USER,))))
    assert decided(replace(USER, step=4), earlier=(USER,)) == replace(USER, step=4)
    other = replace(USER, detail="KeyError: 3")
    assert decided(other, earlier=(USER,)) == other


def test_data_error_is_reported_without_traceback():
    failure = error(decided(Fault(FaultCause.DATA, worker(0), 0, 0, "no such file"), steps=0))
    assert isinstance(failure, JobFailedError)
    assert str(failure) == "no such file"


def test_damaged_state_is_repaired_if_restored():
    assert decided(STATE) == STATE
    assert str(error(decided(STATE, restored=False))) == "step-8 is damaged"


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
        (
            tuple(replace(fault, worker=worker(9, "x"), generation=1) for fault in hardware(5)),
            True,
        ),
    ],
)
def test_hardware_fault_budget(earlier: tuple[Fault, ...], repaired: bool):
    decision = decided(replace(LOST, generation=9), earlier=earlier)
    assert isinstance(decision, Fault if repaired else RayzeroError)


def test_broken_device_is_hardware_and_explains_what_follows_it():
    """One rank's error in a kernel fails the others' collectives, and perhaps its own function."""
    device = replace(LOST, cause=FaultCause.DEVICE, detail="CUDA error: uncorrectable ECC error")
    for others in ((USER, COLLECTIVE), (COLLECTIVE, USER)):
        assert decided(*others, device, steps=0) == device
    assert decided(device, replace(LOST, worker=worker(0))) != device
    decision = decided(replace(device, generation=9), earlier=hardware(2))
    assert "2 hardware faults" in str(error(decision))
    assert "cannot use its device any more" in describe_fault(device)
    faults = [replace(device, generation=number) for number in (1, 2, 3)]
    assert quarantined_nodes(faults, ["a", "b"], 50.0, 110.0) == {"b"}


def test_device_that_breaks_three_times_in_one_step_is_broken_by_the_function():
    *earlier, third = (replace(loss, cause=FaultCause.DEVICE) for loss in same_losses(3))
    budget = FaultBudget(max_faults=20, window_s=50.0)
    failure = error(decided(third, earlier=tuple(earlier), budget=budget))
    assert "the device of rank 1 failed in step 8 3 times in a row" in str(failure)
    assert "CUDA_LAUNCH_BLOCKING" in str(failure)


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


def same_losses(count: int, trained_s: float = 2.0) -> tuple[Fault, ...]:
    """Losses of rank 1 in step 8, each in a generation of its own."""
    return tuple(
        replace(LOST, generation=generation, trained_s=trained_s, at_s=100.0 + generation)
        for generation in range(1, count + 1)
    )


def test_third_equal_loss_in_the_same_step_is_a_user_error():
    budget = FaultBudget(max_faults=20, window_s=50.0)
    assert decided(same_losses(2)[-1], earlier=same_losses(1), budget=budget)
    *earlier, third = same_losses(3)
    failure = error(decided(third, earlier=tuple(earlier), budget=budget))
    assert "rank 1 ended in step 8 3 times in a row" in str(failure)
    assert "os._exit" in str(failure)
    for change in (
        {"step": 9},
        {"rank": 0},
        {"trained_s": 9.0},
        {"cause": FaultCause.NODE_LOST},
    ):
        other = replace(third, **change)  # type: ignore[arg-type]
        assert decided(other, earlier=tuple(earlier), budget=budget) is other


def test_process_that_exits_with_0_is_a_user_error_when_the_next_rank_does():
    """Also if ranks just go, so that no rank does it twice. The status is a real process's."""
    with subprocess.Popen([sys.executable, "-c", "import os; os._exit(0)"]) as process:
        _, status = os.waitpid(process.pid, 0)
        process.returncode = 0
    first = replace(LOST, rank=2, worker=worker(2), detail=process_end._describe(status))
    assert decided(first) is first
    second = replace(first, rank=1, worker=worker(1), generation=2, trained_s=0.1)
    text = str(error(decided(second, earlier=(first,))))
    assert "rank 2 on node node-a (pid 4712) and then rank 1 on node node-a (pid 4711)" in text
    assert "exited with code 0 in step 8" in text
    for change in ({"step": 9}, {"detail": "its process exited with code 1"}, {"generation": 1}):
        other = replace(second, **change)  # type: ignore[arg-type]
        assert decided(other, earlier=(first,)) is other


def test_equal_losses_are_recognized_once_the_survivors_told_their_step():
    *earlier, third = same_losses(3)
    history = [*earlier, replace(third, step=4)]
    assert repeated_loss(history, 3) is None
    told = corrected(history, 3, 8)
    assert told == [*earlier, third]
    assert "ended in step 8 3 times in a row" in str(repeated_loss(told, 3))
    assert corrected(history, 3, 2) == history, "the step never goes back"


HUNG = replace(LOST, cause=FaultCause.HANG, place="data.py:12, in __getitem__", traceback="frames")


def test_third_hang_in_the_same_line_of_the_same_step_is_a_user_error():
    """Whichever rank the sample falls to, and however long it trained before."""
    budget = FaultBudget(max_faults=20, window_s=500.0)
    first = replace(HUNG, rank=0, trained_s=500.0)
    second, third = (replace(HUNG, generation=number, trained_s=120.0) for number in (2, 3))
    assert decided(second, earlier=(first,), budget=budget) is second
    failure = error(decided(third, earlier=(first, second), budget=budget))
    assert "hung in step 8 3 times in a row at data.py:12, in __getitem__" in str(failure)
    assert failure.traceback == "frames"
    assert "recovery.hang_timeout_s" in str(failure)
    for change in ({"step": 9}, {"place": ""}, {"place": "data.py:13, in __getitem__"}):
        other = replace(third, **change)  # type: ignore[arg-type]
        assert decided(other, earlier=(first, second), budget=budget) is other


def test_early_return_is_a_user_error_when_it_repeats():
    early = Fault(FaultCause.EARLY_RETURN, worker(1), 1, 3, "it returned: too early", 100.0, 1)
    assert decided(early, COLLECTIVE) is early
    assert "it returned" in str(error(decided(replace(early, generation=2), earlier=(early,))))


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
    fault = Fault(FaultCause.USER_CODE, worker(1), 1, 8, "ZeroDivisionError", 100.0, 3)
    assert as_newcomers(replace(fault, **change), (), entered_in, restored_step=7).cause is cause
    earlier = (replace(fault, generation=2, worker=worker(0)),)  # not only in a new function
    known = as_newcomers(fault, earlier, entered_in, restored_step=7)
    assert known.cause is FaultCause.USER_CODE


def test_failure_of_a_new_function_ends_no_job():
    fault = Fault(FaultCause.NEWCOMER, worker(1), 1, 8, "ZeroDivisionError", 100.0, 3)
    budget = FaultBudget(0, 100.0)
    assert decided(fault, COLLECTIVE, earlier=(fault, fault), budget=budget) is fault
    assert "rank 1 on node" in describe_fault(fault)
    assert "is new, and raised an exception in step 8" in describe_fault(fault)
