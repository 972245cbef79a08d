"""Who is to blame for a stall, by what the heartbeats say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.orchestrator.policies.hang import START_GRACE_S, Hang, RankProgress, find_hang
from rayzero.workers.messages import Heartbeat

LIMIT_S = 30.0


def rank(
    number: int,
    phase: str = "reduce",
    collective: int = 12,
    silent_s: float = 31.0,
    waiting: bool = True,
    step: int = 7,
    **known: float,
) -> RankProgress:
    beat = Heartbeat(number, step, phase, silent_s, collective, waiting)
    return RankProgress(f"node-{number}", 100 + number, beat, **known)


def culprit(*ranks: RankProgress) -> int | None:
    stall = find_hang(ranks, LIMIT_S)
    assert stall is not None
    return stall.rank


def test_no_rank_no_stall() -> None:
    assert find_hang((), LIMIT_S) is None


def test_progress_is_no_stall() -> None:
    assert find_hang([rank(0, silent_s=29), rank(1, silent_s=0.1)], LIMIT_S) is None


def test_the_rank_that_did_not_enter_is_to_blame_and_described() -> None:
    hung = rank(1, "forward", collective=11, waiting=False, silent_s=31.5)
    stall = find_hang([rank(0), hung, rank(2)], LIMIT_S)
    assert stall == Hang(
        1,
        "rank 1 on node node-1 (pid 101) has been silent for 31.5 s in phase forward of step 7, "
        "after collective 11; 2 ranks wait for it, the furthest in collective 12 of step 7",
    )


def test_a_slow_rank_that_makes_progress_is_not_blamed() -> None:
    slow = rank(1, "forward", collective=11, waiting=False, silent_s=10)
    assert find_hang([rank(0, silent_s=60), slow], LIMIT_S) is None


def test_the_rank_furthest_behind_is_to_blame_even_if_it_waits() -> None:
    assert culprit(rank(0, collective=12), rank(1, collective=11), rank(2)) == 1
    assert culprit(rank(0, step=8, collective=1), rank(1, step=7, collective=90)) == 1


def test_a_rank_that_waits_in_an_early_collective_is_not_behind_one_that_computes() -> None:
    """Sums overlap backward: at its end a rank waits for the first of those it launched."""
    hung = rank(1, "backward", collective=11, waiting=False)
    assert culprit(rank(0, collective=9), hung, rank(2, collective=9)) == 1


def test_not_waiting_comes_before_waiting_and_the_longest_silence_first() -> None:
    assert culprit(rank(0), rank(1, waiting=False), rank(2)) == 1
    pair = [rank(number, waiting=False, silent_s=31 + number) for number in range(3)]
    assert culprit(*pair) == 2


def test_a_rank_alone() -> None:
    stall = find_hang([rank(0, "data", waiting=False, collective=3)], LIMIT_S)
    assert stall is not None
    assert stall.rank == 0
    assert stall.reason.endswith("in phase data of step 7, after collective 3")


def test_when_all_wait_in_one_collective_no_rank_is_to_blame() -> None:
    stall = find_hang([rank(0), rank(1), rank(2, silent_s=35)], LIMIT_S)
    assert stall is not None
    assert stall.rank is None
    assert "all 3 ranks" in stall.reason
    assert "collective 12 of step 7" in stall.reason
    assert "network" in stall.reason


def test_when_all_wait_and_a_reply_begins_to_be_late_nothing_is_decided_yet() -> None:
    assert find_hang([rank(0), rank(1, overdue_s=0.5, age_s=3)], LIMIT_S) is None


def test_a_process_that_does_not_answer_beats_others() -> None:
    hung = rank(1, "forward", collective=11, waiting=False)
    mute = rank(2, silent_s=0.1, age_s=30, overdue_s=28)
    assert culprit(rank(0), hung, mute) == 2
    stall = find_hang([rank(0), mute], LIMIT_S)
    assert stall is not None
    assert "rank 2 on node node-2 (pid 102) does not respond" in stall.reason
    assert "28.0 s late" in stall.reason


def test_a_process_that_does_not_respond_is_blamed_before_silent_ranks() -> None:
    others = rank(0, "data", silent_s=1, waiting=False)
    assert find_hang([others, rank(1, silent_s=0, age_s=29, overdue_s=27)], LIMIT_S) is None
    assert culprit(others, rank(1, silent_s=0, age_s=31, overdue_s=29)) == 1


def test_a_reply_that_is_a_little_late_is_not_blamed() -> None:
    hung = rank(1, "forward", collective=11, waiting=False)
    late = rank(2, overdue_s=2, age_s=4)
    assert culprit(rank(0), hung, late) == 1


def test_the_age_of_a_heartbeat_counts_only_when_the_next_one_is_late() -> None:
    fresh = rank(0, "data", silent_s=29.5, waiting=False, age_s=1.5)
    assert find_hang([fresh], LIMIT_S) is None
    assert culprit(replace(fresh, overdue_s=0.1)) == 0


@pytest.mark.parametrize("phase", ["start", "join", "load"])
def test_a_rank_that_starts_has_its_grace(phase: str) -> None:
    loading = rank(1, phase, collective=0, step=0, waiting=False, silent_s=100)
    assert find_hang([rank(0), loading], LIMIT_S) is None
    mute = replace(loading, overdue_s=90, age_s=100)
    assert find_hang([rank(0), mute], LIMIT_S) is None
    beat = replace(loading.heartbeat, silent_s=START_GRACE_S + 1)
    assert culprit(rank(0), replace(loading, heartbeat=beat)) == 1


def test_a_new_process_has_its_grace_in_the_first_step() -> None:
    compiling = rank(1, "forward", collective=0, waiting=False)
    assert find_hang([rank(0), replace(compiling, is_new=True)], LIMIT_S) is None
    assert culprit(rank(0), compiling) == 1


def test_the_grace_is_never_shorter_than_the_timeout() -> None:
    loading = rank(0, "load", waiting=False, silent_s=400)
    assert find_hang([loading], hang_timeout_s=500) is None


WATCHED = st.builds(
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


@given(st.lists(WATCHED, min_size=1, max_size=5))
def test_only_a_rank_beyond_its_limit_or_without_replies_is_blamed(
    ranks: list[RankProgress],
) -> None:
    ranks = [
        replace(one, heartbeat=replace(one.heartbeat, rank=number))
        for number, one in enumerate(ranks)
    ]
    stall = find_hang(ranks, LIMIT_S)
    if stall is None or stall.rank is None:
        return
    one = ranks[stall.rank]
    limit_s = START_GRACE_S if one.is_starting else LIMIT_S
    assert one.silent_s > limit_s or (one.overdue_s > LIMIT_S / 4 and not one.is_starting)
