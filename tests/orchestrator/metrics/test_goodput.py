"""Attribution of wall time for given and random histories."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.orchestrator.machine import State
from rayzero.orchestrator.metrics.goodput import TimeAccounting, TimeCategory

PHASES = tuple(("detect drain fence select_step select_members rendezvous load recompute").split())
Call = tuple[Any, ...]
"""A method's name, and its arguments; the last one is the time."""


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


def step(number: int, step_s: float, at_s: float, **waits: float) -> Call:
    return "on_step", number, step_s, {TimeCategory(it): s for it, s in waits.items()}, at_s


def state(entered: State, at_s: float) -> Call:
    return "on_state", entered, at_s


def recovered(at_s: float, **phases: float) -> Call:
    return "recovery_finished", phases, at_s


REPAIR = [state(State.RECOVERING, 108), state(State.RUNNING, 109)]
CASES: dict[str, tuple[list[Call], dict[str, float]]] = {
    "the first step": ([step(1, 1.0, 107)], {}),
    "a step's waits are not its time": (
        [step(2, 1.5, 109, data=0.5, mirror=0.25, checkpoint=0.25)],
        {"productive": 2.0, "data": 0.5, "mirror": 0.25, "checkpoint": 0.25},
    ),
    "steps reported together: all of the 2 s are attributed": (
        [step(2, 1.0, 109, data=0.5), step(3, 1.0, 109, data=0.5)],
        {"productive": 2.5, "data": 0.5},
    ),
    "and the rest later": (
        [step(2, 1.0, 109, data=0.5), step(3, 1.0, 109, data=0.5), step(4, 1.0, 110)],
        {"productive": 3.0, "data": 1.0},
    ),
    "a repair by phase, 0.9 s into a step, 0.1 s after the fault's first sign": (
        [
            state(State.RECOVERING, 108.0),
            state(State.RUNNING, 108.5),
            step(2, 1.0, 110.0),
            recovered(
                110.0,
                detect=0.1,
                fence=0.1,
                select_step=0.1,
                select_members=0.2,
                rendezvous=0.1,
                load=0.3,
                recompute=0.2,
            ),
        ],
        {
            "productive": 2.0,
            "interrupted": 0.9,
            "waiting": 0.2,
            "recovery_detect": 0.1,
            "recovery_fence": 0.1,
            "recovery_select_step": 0.1,
            "recovery_rendezvous": 0.1,
            "recovery_load": 0.3,
            "recovery_recompute": 0.2,
        },
    ),
    "step 2 was finished, and no rank reported it": (
        [
            state(State.RECOVERING, 108.5),
            state(State.RUNNING, 109),
            step(3, 1.0, 110),
            recovered(110, detect=0.5, load=0.5),
        ],
        {"productive": 3.0, "recovery_detect": 0.5, "recovery_load": 0.5},
    ),
    "redone steps": (
        [
            *(step(2, 1.0, 108), *REPAIR, step(1, 1.0, 110), recovered(110, load=1.0)),
            *(step(2, 1.0, 111), step(3, 1.0, 112)),
        ],
        {"productive": 3.0, "redone": 2.0, "recovery_load": 1.0},
    ),
    "a resize in which the current step is finished": (
        [
            state(State.RESIZING, 107.5),
            step(2, 1.0, 108),
            state(State.RUNNING, 109),
            step(3, 1.0, 111),
            recovered(111, drain=0.6, select_members=0.5, rendezvous=0.5, load=0.9),
        ],
        {"productive": 3.0, "waiting": 0.5, "resizing": 1.5},
    ),
    "a fault during a resize": (
        [
            *(state(State.RESIZING, 107), *REPAIR, step(2, 1.0, 111)),
            recovered(111, drain=1.0, detect=0.5, load=1.5),
        ],
        {"productive": 2.0, "resizing": 1.0, "recovery_detect": 0.5, "recovery_load": 1.5},
    ),
    **{
        " -> ".join(states): (
            [state(it, 107.0 + number) for number, it in enumerate(states, 1)],
            {category: float(len(states))},
        )
        for states, category in (
            ((State.SUCCEEDED,), "finishing"),
            ((State.FAILED,), "interrupted"),
            ((State.STOPPING, State.STOPPED), "stopping"),
            ((State.RECOVERING, State.FAILED), "interrupted"),
            ((State.RESIZING, State.SUCCEEDED), "finishing"),
            ((State.RESIZING, State.FAILED), "resizing"),
        )
    },
}


@pytest.mark.parametrize(("calls", "seconds"), CASES.values(), ids=CASES)
def test_attribution_of_time(calls: list[Call], seconds: dict[str, float]):
    account = running()
    for method, *arguments in calls:
        getattr(account, method)(*arguments)
    assert spent(account, calls[-1][-1]) == {"starting": 6.0, "productive": 1.0} | seconds


def test_no_time_passes_after_final_state():
    account = TimeAccounting(0.0)  # of a job that never started
    account.on_state(State.STARTING, 0.0)
    account.on_state(State.FAILED, 3.0)
    assert spent(account, 3.0) == {"starting": 3.0}
    account = running()
    times = account.breakdown_at(114.0)
    assert (times.unattributed_s, times.wall_s, times.goodput) == (7.0, 14.0, 1 / 14)
    account.on_state(State.SUCCEEDED, 110.0)
    times = account.breakdown_at(1000.0)
    assert (times.wall_s, times.unattributed_s, times.goodput) == (10.0, 0.0, 0.1)


def test_adopted_run_continues_attribution():
    account = TimeAccounting(1000.0)
    account.restore({"starting": 6.0, "productive": 80.0, "redone": 1.0}, best_step=40, ago_s=120.0)
    account.on_state(State.STARTING, 1000.0)
    account.on_state(State.RUNNING, 1003.0)
    account.on_step(40, 1.0, {}, 1005.0)  # was finished, and lost with its checkpoint
    account.on_step(41, 1.0, {}, 1006.0)
    seconds = {"starting": 10.0, "productive": 81.0, "redone": 2.0, "adoption": 33.0}
    assert spent(account, 1006) == seconds
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
