"""Attribution of wall time for given and random histories."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.orchestrator.machine import State
from rayzero.orchestrator.metrics.goodput import TimeAccounting, TimeCategory

PHASES = (
    "detect",
    "drain",
    "fence",
    "select_step",
    "select_members",
    "rendezvous",
    "load",
    "recompute",
)


def running(at_s: float = 5.0) -> TimeAccounting:
    """A job whose first step ended 2 s after its state RUNNING, and took 1 s."""
    account = TimeAccounting(100.0)
    account.on_state(State.STARTING, 100.0)
    account.on_state(State.RUNNING, 100.0 + at_s)
    account.on_step(1, 1.0, {}, 100.0 + at_s + 2)
    return account


def spent(account: TimeAccounting, now_s: float) -> dict[str, float]:
    return {
        str(category): round(s, 9)
        for category, s in account.breakdown_at(now_s).seconds.items()
        if s
    }


def test_time_before_first_step_is_starting():
    account = running()
    assert spent(account, 107) == {"starting": 6.0, "productive": 1.0}
    assert account.breakdown_at(107).goodput == 1 / 7


def test_step_time_excludes_waits():
    account = running()
    account.on_step(
        2,
        1.5,
        {TimeCategory.DATA: 0.5, TimeCategory.MIRROR: 0.25, TimeCategory.CHECKPOINT: 0.25},
        109,
    )
    assert spent(account, 109) == {
        "starting": 6.0,
        "productive": 2.0,
        "data": 0.5,
        "mirror": 0.25,
        "checkpoint": 0.25,
    }


def test_waits_of_steps_reported_together_are_booked_later():
    account = running()
    account.on_step(2, 1.0, {TimeCategory.DATA: 0.5}, 109)
    account.on_step(3, 1.0, {TimeCategory.DATA: 0.5}, 109)  # all of the 2 s are attributed
    assert spent(account, 109)["data"] == 0.5
    account.on_step(4, 1.0, {}, 110)
    assert spent(account, 110)["data"] == 1.0


def test_recovery_by_phase_and_interrupted_step():
    account = running()
    account.on_state(State.RECOVERING, 108.0)  # 0.9 s into the step, 0.1 s after its first sign
    account.on_state(State.RUNNING, 108.5)
    account.on_step(2, 1.0, {}, 110.0)
    phases = {
        "detect": 0.1,
        "fence": 0.1,
        "select_step": 0.1,
        "select_members": 0.2,
        "rendezvous": 0.1,
        "load": 0.3,
    }
    account.recovery_finished({**phases, "recompute": 0.2}, 110.0)
    assert spent(account, 110) == {
        "starting": 6.0,
        "productive": 2.0,
        "interrupted": 0.9,
        "recovery_detect": 0.1,
        "recovery_fence": 0.1,
        "recovery_select_step": 0.1,
        "waiting": 0.2,
        "recovery_rendezvous": 0.1,
        "recovery_load": 0.3,
        "recovery_recompute": 0.2,
    }


def test_step_without_report_of_lost_rank_is_productive():
    account = running()
    account.on_state(State.RECOVERING, 108.5)  # step 2 is finished, and no rank reported it
    account.on_state(State.RUNNING, 109)
    account.on_step(3, 1.0, {}, 110)
    account.recovery_finished({"detect": 0.5, "load": 0.5}, 110)
    assert spent(account, 110) == {
        "starting": 6.0,
        "productive": 3.0,
        "recovery_detect": 0.5,
        "recovery_load": 0.5,
    }


def test_redone_steps_are_not_productive():
    account = running()
    account.on_step(2, 1.0, {}, 108)
    account.on_state(State.RECOVERING, 108)
    account.on_state(State.RUNNING, 109)
    for step in (1, 2, 3):
        account.on_step(step, 1.0, {}, 109.0 + step)
        if step == 1:
            account.recovery_finished({"load": 1.0}, 110)
    seconds = spent(account, 112)
    assert (seconds["redone"], seconds["productive"]) == (2.0, 3.0)


def test_resize_with_drained_step():
    account = running()
    account.on_state(State.RESIZING, 107.5)
    account.on_step(2, 1.0, {}, 108)  # the current step is finished meanwhile
    account.on_state(State.RUNNING, 109)
    account.on_step(3, 1.0, {}, 111)
    account.recovery_finished(
        {"drain": 0.6, "select_members": 0.5, "rendezvous": 0.5, "load": 0.9}, 111
    )
    assert spent(account, 111) == {
        "starting": 6.0,
        "productive": 3.0,
        "waiting": 0.5,
        "resizing": 1.5,
    }


def test_fault_during_resize_is_recovery_time():
    account = running()
    account.on_state(State.RESIZING, 107)
    account.on_state(State.RECOVERING, 108)
    account.on_state(State.RUNNING, 109)
    account.on_step(2, 1.0, {}, 111)
    account.recovery_finished({"drain": 1.0, "detect": 0.5, "load": 1.5}, 111)
    seconds = spent(account, 111)
    assert (seconds["resizing"], seconds["recovery_load"]) == (1.0, 1.5)


@pytest.mark.parametrize(
    ("states", "category"),
    [
        ((State.SUCCEEDED,), "finishing"),
        ((State.FAILED,), "interrupted"),
        ((State.STOPPING, State.STOPPED), "stopping"),
        ((State.RECOVERING, State.FAILED), "interrupted"),
        ((State.RESIZING, State.SUCCEEDED), "finishing"),
        ((State.RESIZING, State.FAILED), "resizing"),
    ],
)
def test_final_category(states: tuple[State, ...], category: str):
    account = running()
    for number, state in enumerate(states, start=1):
        account.on_state(state, 107.0 + number)
    assert spent(account, 107.0 + len(states)) == {
        "starting": 6.0,
        "productive": 1.0,
        category: float(len(states)),
    }


def test_job_that_never_started():
    account = TimeAccounting(0.0)
    account.on_state(State.STARTING, 0.0)
    account.on_state(State.FAILED, 3.0)
    assert spent(account, 3.0) == {"starting": 3.0}


def test_no_time_passes_after_final_state():
    account = running()
    account.on_state(State.SUCCEEDED, 110.0)
    times = account.breakdown_at(1000.0)
    assert (times.wall_s, times.unattributed_s, times.goodput) == (10.0, 0.0, 0.1)


def test_time_in_progress_is_unattributed_and_lowers_goodput():
    account = running()
    times = account.breakdown_at(114.0)
    assert (times.unattributed_s, times.wall_s, times.goodput) == (7.0, 14.0, 1 / 14)


def test_adopted_run_continues_attribution():
    account = TimeAccounting(1000.0)
    account.restore({"starting": 6.0, "productive": 80.0, "redone": 1.0}, best_step=40, ago_s=120.0)
    account.on_state(State.STARTING, 1000.0)
    account.on_state(State.RUNNING, 1003.0)
    account.on_step(40, 1.0, {}, 1005.0)  # was finished, and lost with its checkpoint
    account.on_step(41, 1.0, {}, 1006.0)
    assert spent(account, 1006) == {
        "starting": 10.0,
        "productive": 81.0,
        "redone": 2.0,
        "adoption": 33.0,
    }
    assert account.breakdown_at(1006).wall_s == 126.0


times = st.floats(min_value=0, max_value=1e4, allow_nan=False)
lengths = st.floats(min_value=-1, max_value=1e4, allow_nan=False)
histories = st.one_of(
    st.tuples(st.just("on_state"), st.sampled_from(State)),
    st.tuples(
        st.just("on_step"),
        st.integers(1, 9),
        lengths,
        st.dictionaries(
            st.sampled_from([TimeCategory.DATA, TimeCategory.MIRROR, TimeCategory.CHECKPOINT]),
            lengths,
        ),
    ),
    st.tuples(
        st.just("recovery_finished"),
        st.dictionaries(st.sampled_from([*PHASES, "unknown"]), lengths),
    ),
)


pasts = st.none() | st.tuples(
    st.dictionaries(st.sampled_from([*TimeCategory, "unknown"]), lengths),
    st.integers(0, 9),
    lengths,
)


@given(times, pasts, st.lists(st.tuples(lengths, histories)))
def test_any_history_sums_to_wall_time(start_s: float, past: tuple | None, history: list):
    """Also for impossible histories and a clock that goes back."""
    account, now_s, latest_s = TimeAccounting(start_s), start_s, start_s
    if past is not None:
        account.restore(*past)
    before, _ = account.totals_ns()
    before_ns = sum(before.values())
    assert before_ns >= round(past[2] * 1e9 if past else 0)
    ended = False
    for passed_s, (what, *args) in history:
        now_s += passed_s
        latest_s = latest_s if ended else max(latest_s, now_s)
        ended = ended or (what == "on_state" and args[0].is_final)
        getattr(account, what)(*args, now_s)
        booked, unattributed = account.totals_ns()
        assert (
            sum(booked.values()) + unattributed
            == round(latest_s * 1e9) - round(start_s * 1e9) + before_ns
        )
        assert unattributed >= 0
        for category in TimeCategory:  # counters only grow
            assert booked[category] >= before[category]
        before = booked
        times = account.breakdown_at(now_s)
        assert 0 <= times.goodput <= 1
        assert times.goodput * times.wall_s == pytest.approx(times.seconds[TimeCategory.PRODUCTIVE])
