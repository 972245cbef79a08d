"""Detection of hung ranks from heartbeats."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.orchestrator.policies.hang import (
    abort_limit_s,
    find_early_return,
    find_hang,
    find_overstaying,
)
from rayzero.orchestrator.policies.hang_limits import (
    HangLimits,
    RankProgress,
    StepHistory,
    StepTimes,
)
from rayzero.workers.messages import Heartbeat, StepReport
from rayzero.workers.step_rows import combine

TIMEOUT_S = 30.0
LIMITS = HangLimits(patience_s=TIMEOUT_S, starting_s=300, fixed_s=TIMEOUT_S)


def rank(
    number: int,
    phase: str = "reduce",
    collective: int = 12,
    silent_s: float = 31.0,
    waiting: bool = True,
    step: int = 7,
    **fields: float,
) -> RankProgress:
    heartbeat = Heartbeat(number, step, phase, silent_s, collective, waiting)
    return RankProgress(f"node-{number}", 100 + number, heartbeat, **fields)


def of(item: RankProgress, **heartbeat: Any) -> RankProgress:
    return replace(item, heartbeat=item.heartbeat._replace(**heartbeat))


HUNG = rank(1, "forward", collective=11, waiting=False)
SILENT = rank(2, silent_s=0.1, age_s=30, overdue_s=28)
IN_DATA = rank(0, "data", silent_s=1, waiting=False)
FRESH = rank(0, "data", silent_s=29.5, waiting=False, age_s=1.5)
BUSY = [rank(number, waiting=False, silent_s=31 + number) for number in range(3)]
LOADING = rank(1, "load", collective=0, step=0, waiting=False, silent_s=100)
CASES: dict[str, tuple[list[RankProgress], int | None]] = {
    "no ranks": ([], None),
    "all have progress": ([rank(0, silent_s=29), rank(1, silent_s=0.1)], None),
    "a slow one has progress": ([rank(0, silent_s=60), of(HUNG, silent_s=10)], None),
    "furthest behind": ([rank(0, collective=12), rank(1, collective=11), rank(2)], 1),
    "a step behind": ([rank(0, step=8, collective=1), rank(1, step=7, collective=90)], 1),
    # Reductions overlap backward: at its end, a rank waits for the first one it launched.
    "in an earlier collective": (
        [rank(0, collective=9), of(HUNG, phase="backward"), rank(2, collective=9)],
        1,
    ),
    "computes": ([rank(0), rank(1, waiting=False), rank(2)], 1),
    "computes for longest": (BUSY, 2),
    "only one": ([rank(0, "data", waiting=False, collective=3)], 0),
    "a reply is late": ([rank(0), rank(1, overdue_s=0.5, age_s=3)], None),
    "a reply is late, another hangs": ([rank(0), HUNG, rank(2, overdue_s=2, age_s=4)], 1),
    "unresponsive before hung": ([rank(0), HUNG, SILENT], 2),
    "not yet unresponsive": ([IN_DATA, rank(1, silent_s=0, age_s=29, overdue_s=27)], None),
    "unresponsive": ([IN_DATA, rank(1, silent_s=0, age_s=31, overdue_s=29)], 1),
    "the next heartbeat may come": ([FRESH], None),
    "the next heartbeat is overdue": ([replace(FRESH, overdue_s=0.1)], 0),
    **{
        f"may {phase} longer": ([rank(0), of(LOADING, phase=phase)], None)
        for phase in ("start", "join", "load")
    },
    "may load without replies": ([rank(0), replace(LOADING, overdue_s=90, age_s=100)], None),
    "loads too long": ([rank(0), of(LOADING, silent_s=LIMITS.starting_s + 1)], 1),
    "may compile": ([rank(0), replace(HUNG, is_new=True)], None),
}


@pytest.mark.parametrize(("ranks", "hung"), CASES.values(), ids=CASES)
def test_hung_rank(ranks: list[RankProgress], hung: int | None) -> None:
    hang = find_hang(ranks, LIMITS)
    assert (hang is None) == (hung is None)
    assert (hang and hang.rank) == hung


@pytest.mark.parametrize(
    ("ranks", "hung", "reason"),
    [
        (
            [rank(0), of(HUNG, silent_s=31.5), rank(2)],
            1,
            "rank 1 on node node-1 (pid 101) has been silent for 31.5 s in phase forward of step "
            "7, after collective 11; 2 ranks wait for it, the furthest in collective 12 of step 7",
        ),
        (
            [rank(0, "data", waiting=False, collective=3)],
            0,
            "in phase data of step 7, after collective 3",
        ),
        (
            [rank(0), SILENT],
            2,
            "node-2 (pid 102) does not respond: its reply is 28.0 s late",
        ),
        # All wait in the same collective.
        (
            [rank(0), rank(1), rank(2, silent_s=35)],
            None,
            "all 3 ranks have been waiting for 35.0 s in collective 12 of step 7",
        ),
    ],
)
def test_reason_says_what_the_rank_does(
    ranks: list[RankProgress], hung: int | None, reason: str
) -> None:
    hang = find_hang(ranks, LIMITS)
    assert hang.rank == hung
    assert reason in hang.reason


def test_first_step_is_limited_by_those_measured() -> None:
    measured = replace(LIMITS, first_step_s=10)
    compiling = replace(rank(1, "forward", 0, 39, waiting=False), is_new=True)
    assert measured.describe(compiling) == "40 s, 4 times the longest first step so far"
    assert find_hang([rank(0), compiling], measured) is None
    late = of(compiling, silent_s=41)
    assert find_hang([rank(0), late], LIMITS) is None
    assert find_hang([rank(0), late], measured) is not None
    assert measured.describe(rank(1, "load")) == "300 s, workers.start_timeout_s"
    assert measured.describe(rank(1)) == "30 s, recovery.hang_timeout_s"
    assert replace(LIMITS, first_step_s=1).of(compiling) == LIMITS.fixed_s
    assert replace(LIMITS, first_step_s=100).of(compiling) == LIMITS.starting_s


def test_grace_is_never_shorter_than_timeout() -> None:
    loading = rank(0, "load", waiting=False, silent_s=400)
    assert find_hang([loading], HangLimits(500, 300, 500)) is None


def test_rank_may_stay_in_an_ending_generation_as_long_as_it_may_hang():
    busy = rank(1, "forward", waiting=False, silent_s=25)
    assert find_overstaying([rank(0, silent_s=3), busy], LIMITS, ending_s=29) is None
    hang = find_overstaying([rank(0, silent_s=3), busy], LIMITS, ending_s=31)
    assert hang.rank == 0
    assert "has not left its generation for 31.0 s, in phase reduce of step 7" in hang.reason
    assert find_overstaying([of(busy, silent_s=31)], LIMITS, ending_s=1) is not None
    assert find_overstaying([replace(busy, is_new=True)], LIMITS, ending_s=31) is None


def test_rank_that_waited_for_the_hung_one_has_time_for_the_abort():
    """Its silence is the hung rank's; without this the first check after the fence killed it."""
    freed = rank(1, silent_s=31)
    assert find_overstaying([freed], LIMITS, ending_s=1) is None
    assert find_overstaying([freed], LIMITS, ending_s=31) is not None
    stopped = replace(freed, age_s=4.0, overdue_s=2.0)
    assert find_overstaying([stopped], LIMITS, ending_s=1) is not None
    reading = of(freed, silent_s=40, waiting=False)
    on_gpu = replace(LIMITS, abort_s=6.3)
    assert find_overstaying([reading], on_gpu, ending_s=6) is None, "the host reads the device"
    assert find_overstaying([reading], on_gpu, ending_s=7) is not None


def test_rank_that_returned_before_a_collective_is_named():
    early = rank(0, "data", collective=11, waiting=False)
    hang = find_early_return([early], [rank(1, silent_s=4)], LIMITS)
    assert hang.rank == 0
    assert "rank 1 waits for it in collective 12 of step 7" in hang.reason
    assert find_early_return([early], [rank(1, silent_s=2)], LIMITS) is None
    assert find_early_return([early], [rank(1, waiting=False, silent_s=40)], LIMITS) is None


def test_rank_that_returned_before_a_collective_of_the_function_itself_is_named():
    """Which has no number. A rank may also return before its last collective has ended on all."""
    early = rank(0, "mirror", waiting=False)
    assert find_early_return([early], [rank(1, "outside", silent_s=29)], LIMITS) is None
    hang = find_early_return([early], [rank(1, "outside", silent_s=31)], LIMITS)
    assert hang.rank == 0
    assert "rank 1 waits for it since 31 s in step 7" in hang.reason
    behind = rank(1, "outside", collective=11, silent_s=40)
    assert find_early_return([early], [behind], LIMITS) is None


RANKS = st.builds(
    lambda phase, collective, step, silent_s, waiting, age_s, overdue_s, new: RankProgress(
        "node", 1, Heartbeat(0, step, phase, silent_s, collective, waiting), age_s, overdue_s, new
    ),
    st.sampled_from(["forward", "reduce", "load"]),
    st.integers(0, 3),
    st.integers(0, 3),
    st.floats(0, 400),
    st.booleans(),
    st.floats(0, 100),
    st.just(0.0) | st.floats(0, 60),
    st.booleans(),
)


@given(st.lists(RANKS, min_size=1, max_size=5))
def test_hung_rank_exceeded_timeout_or_is_unresponsive(ranks: list[RankProgress]) -> None:
    ranks = [of(item, rank=number) for number, item in enumerate(ranks)]
    hang = find_hang(ranks, LIMITS)
    if hang is None or hang.rank is None:
        return
    hung = ranks[hang.rank]
    limit_s = LIMITS.starting_s if hung.is_starting else TIMEOUT_S
    assert hung.silent_s > limit_s or (hung.overdue_s > TIMEOUT_S / 4 and not hung.is_starting)


def test_abort_on_a_gpu_has_time_for_what_is_queued():
    """At a hang timeout of seconds, the abort of 580 collectives would be taken for a hang."""
    beat = Heartbeat(0, step=11, phase="backward", silent_s=0.0, collective=5800)
    abort_s = abort_limit_s([beat, beat._replace(collective=5799)], first_step=2)
    assert abort_s == pytest.approx(0.5 + 580 * 0.01)
    assert abort_limit_s([beat._replace(step=0, collective=3)], first_step=1) == 0.53
    limits, busy = HangLimits(5.0, 300.0, 5.0, abort_s=abort_s), rank(1, silent_s=0)
    assert find_overstaying([busy], limits, ending_s=11) is None
    assert find_overstaying([busy], limits, ending_s=12) is not None
    assert "and 6.3 s for the abort" in limits.describe(busy)


def add_step(times: StepTimes, step_s: float, waited_s: float = 0.0, **phases: float) -> None:
    gauges = {f"phases/{name}": seconds for name, seconds in phases.items()}
    gauges |= {"step_s": step_s, "exposed_comm_s": waited_s}
    history = StepHistory(defaultdict(lambda: times), in_generation={0})
    history.add(combine([0], [StepReport(1, 0, 1, {}, gauges)]), lambda _: 0.0)


def times_of(**phases: float) -> StepTimes:
    """Of 300 steps, in all of which a phase took that long."""
    times = StepTimes()
    for _ in range(300):
        add_step(times, sum(phases.values()) + 9, 9.0, **phases)
    return times


LEARNED = HangLimits(
    120, 600, times={number: times_of(forward=0.5, other=0.1) for number in range(4)}
)
SLOW = replace(LEARNED, times=dict.fromkeys(range(4), times_of(forward=4.0, data=1.0, other=3.0)))
GONE = rank(1, "forward", waiting=False, silent_s=0, age_s=6, overdue_s=4)


@pytest.mark.parametrize(
    ("limits", "of_rank", "limit"),
    [
        (LEARNED, rank(1, "forward", waiting=False), "7 s, the least of what is learned"),
        (LEARNED, rank(1, "reduce", waiting=True), "120 s, recovery.patience_s"),
        (LEARNED, rank(1, "mirror", waiting=False), "120 s, recovery.patience_s"),
        (LEARNED, rank(1, "ledger", waiting=False), "120 s, recovery.patience_s"),
        (LEARNED, rank(1, "outside", waiting=False), "120 s, recovery.patience_s"),
        (
            LEARNED,
            rank(1, "outside", waiting=False, state="S"),
            "7 s, the least of what is learned",
        ),
        (SLOW, rank(1, "forward", waiting=False), "40 s, 5 of its steps"),
        (SLOW, rank(1, "outside", waiting=False, state="S"), "40 s, 5 of its steps"),
        (
            SLOW,
            rank(1, "forward", waiting=False, is_first=True),
            "480 s, 60 of its steps, for it may",
        ),
        (LEARNED, rank(1, "forward", waiting=False, is_first=True), "120 s, recovery.patience_s"),
        (LEARNED, rank(1, "forward", waiting=False, is_new=True), "600 s, workers.start_timeout_s"),
        (LEARNED, rank(9, "forward", waiting=False), "120 s, recovery.patience_s"),
        (
            replace(LEARNED, factors={"forward": 4.0}),
            rank(1, "forward", waiting=False),
            "28 s, doub",
        ),
        (replace(SLOW, factors={"forward": 9.0}), rank(1, "forward", waiting=False), "120 s, doub"),
        (
            replace(LEARNED, fixed_s=30.0),
            rank(1, "forward", waiting=False),
            "30 s, recovery.hang_t",
        ),
        # Nothing is known of a process that does not answer, until its node does.
        (LEARNED, GONE, "120 s, recovery.patience_s"),
        (LEARNED, replace(GONE, is_seen=True), "7 s, the least of what is learned"),
    ],
)
def test_learned_limits(limits: HangLimits, of_rank: RankProgress, limit: str) -> None:
    limit_s, origin = limits._choose(of_rank)
    assert f"{limit_s:g} s, {origin}".startswith(limit)


def test_longest_silence_is_remembered_for_a_thousand_steps() -> None:
    times = times_of(forward=0.5)
    add_step(times, step_s=20.0, forward=20.0)
    add_step(times, step_s=30.0, waited_s=28.0, reduce=29.0)
    limits, in_forward = replace(LEARNED, times={1: times}), rank(1, "forward", waiting=False)
    assert limits.of(in_forward) == 40.0
    assert limits.of(of(in_forward, phase="reduce")) == 7.0, "it waited for others"
    for _ in range(1100):
        add_step(times, step_s=0.5, forward=0.5)
    assert limits.of(in_forward) == 7.0


WAITING = rank(0, silent_s=9)
READING = rank(1, "data", collective=11, waiting=False, silent_s=9)
LEARNED_CASES: dict[str, tuple[list[RankProgress], int | None, str]] = {
    "a read": ([WAITING, READING, rank(2, silent_s=9)], 1, "silent for 9.0 s in phase data"),
    "one of two": ([WAITING, READING], 1, "silent for"),
    "alone": ([of(READING, rank=0)], None, "recovery.patience_s"),
    "half read": ([WAITING, READING, of(READING, rank=2)], None, "half of the ranks"),
    "others read ahead": ([replace(WAITING, reads=True), READING], None, "half of the ranks"),
    "in the script": ([WAITING, of(replace(READING, state="S"), phase="outside")], None, "half"),
    "all compile": ([of(HUNG, silent_s=9), of(HUNG, rank=2, silent_s=9)], None, "half of the"),
    "one computes": ([WAITING, of(HUNG, silent_s=9)], 1, "silent for 9.0 s in phase forward"),
    "alone in its forward": ([of(HUNG, rank=0, silent_s=9)], 0, "in phase forward"),
    "stopped": ([WAITING, replace(GONE, state="T"), rank(2)], 1, "it is stopped (state T)"),
    "deadlock": ([WAITING, replace(GONE, state="S"), rank(2)], 1, "it does not run (state S)"),
    "half of them": ([replace(GONE, state="D"), of(replace(GONE, state="D"), rank=2)], None, ""),
    "stopped at its start": ([replace(GONE, state="T", is_new=True)], 1, "stopped"),
    "blocked at its start": ([replace(GONE, state="S", is_new=True)], None, ""),
    "answers": ([WAITING, replace(READING, state="S", heartbeat=WAITING.heartbeat)], None, ""),
    "locked spin": ([WAITING, replace(GONE, age_s=8, overdue_s=6, is_seen=True)], 1, "not respond"),
    "unreachable": ([WAITING, replace(GONE, age_s=40, overdue_s=38)], None, ""),
}


@pytest.mark.parametrize(("ranks", "hung", "reason"), LEARNED_CASES.values(), ids=LEARNED_CASES)
def test_hang_of_learned_limits(ranks: list[RankProgress], hung: int | None, reason: str) -> None:
    hang = find_hang(ranks, LEARNED)
    assert (hang and hang.rank) == hung
    assert bool(hang) == bool(reason)
    assert reason in (hang.reason if hang else "")
    if "T" in {it.state for it in ranks}:
        assert find_hang(ranks, replace(LEARNED, fixed_s=120.0)) is None, "of a debugger"
        assert find_overstaying(ranks, LEARNED, ending_s=1).rank == hung


@pytest.mark.parametrize(("repeated_s", "factor"), [(0.5, None), (9.0, 2.0)])
def test_false_alarm_doubles_the_limit(repeated_s: float, factor: float | None) -> None:
    history = StepHistory()

    def add(worker: int, report: StepReport, trained_s: float) -> None:
        history.add(combine([worker], [report]), {worker: trained_s}.__getitem__)

    slow = StepReport(1, 1, 7, {}, {"step_s": repeated_s, "phases/forward": repeated_s})
    add(1, replace(slow, step=1, gauges={"phases/forward": 1.0}), 3.0)
    history.add_alarm(rank(1, "forward", silent_s=7.5))
    history.start_generation()
    add(4, slow, repeated_s)
    assert history.factors.get("forward") == factor
    history.start_generation()
    add(4, replace(slow, step=9, gauges={"phases/forward": 50.0}), 50.0)
    assert history.factors.get("forward") == factor, "of another step"
