"""Which workers are slow, and what share of the samples they get."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.data.sampling import samples_per_rank
from rayzero.orchestrator.policies.stragglers import (
    MAX_SHARE,
    MIN_GAIN,
    MIN_SHARE,
    WINDOW_STEPS,
    SpeedTracker,
    balance_shares,
)


def run(
    tracker: SpeedTracker, steps: int, times: dict[int, float], samples: float = 4
) -> list[str]:
    """The messages."""
    messages = [
        tracker.add_step(worker, compute_s, samples)
        for _ in range(steps)
        for worker, compute_s in times.items()
    ]
    return [message for message in messages if message]


def test_slow_and_recovered_worker_is_reported_once() -> None:
    tracker = SpeedTracker()
    times = {0: 0.10, 1: 0.10, 2: 0.15}
    assert run(tracker, WINDOW_STEPS, times) == []  # not after the first steps
    slow = "worker 2 is 1.5 times slower than the others: 0.150 s per step, the others 0.100 s"
    assert run(tracker, 200, times) == [slow]
    (recovered,) = run(tracker, 200, {**times, 2: 0.1})
    assert recovered.startswith("worker 2 is no longer slow: ")
    assert run(tracker, 200, times) == [slow]


@pytest.mark.parametrize(
    ("times", "messages"),
    [
        ({0: 0.1, 1: 0.11, 2: 0.12}, 0),
        ({0: 1.0, 1: 1.29}, 0),
        ({0: 1.0, 1: 1.31}, 1),
        ({0: 3.0}, 0),
    ],
)
def test_slowdown_threshold(times: dict[int, float], messages: int) -> None:
    assert len(run(SpeedTracker(), 200, times)) == messages


def test_outliers_are_not_reported() -> None:
    tracker = SpeedTracker()
    for _ in range(30):
        assert run(tracker, 9, {0: 0.1, 1: 0.1}) == []
        assert run(tracker, 4, {0: 0.1, 1: 5.0}) == []


def test_new_generation_keeps_reports_and_resets_speeds() -> None:
    tracker = SpeedTracker()
    tracker.start_generation((0, 1, 2))
    assert len(run(tracker, 100, {0: 0.1, 1: 0.1, 2: 0.2})) == 1
    tracker.start_generation((0, 2, 3))
    assert tracker.samples_per_s([0, 1, 2, 3]) == (40, None, 20, None)
    assert run(tracker, 100, {0: 0.1, 2: 0.2, 3: 0.1}) == []  # reported before


def test_speed_is_median_of_enough_steps() -> None:
    tracker = SpeedTracker()
    run(tracker, 5, {0: 0.1})
    assert tracker.samples_per_s([0]) == (None,)
    run(tracker, 5, {0: 0.1})
    tracker.add_step(0, 9.0, 4)
    tracker.add_step(0, 0.0, 4)  # not measured
    assert tracker.samples_per_s([0]) == (40,)


SPEEDS = st.lists(st.none() | st.floats(0.01, 1000), min_size=1, max_size=12)


def slowest(shares: tuple[float, ...], speeds: list[float]) -> float:
    return max(share / speed for share, speed in zip(shares, speeds, strict=True))


SKEWED = balance_shares([100, 50])


@pytest.mark.parametrize(
    ("speeds", "now", "shares"),
    [
        ([100, 50], (), (2 / 3, 1 / 3)),  # they follow speed
        ([10, 10.2, 9.9], (), ()),  # equal
        ([None, None], (), ()),
        ([None, None], (0.6, 0.4), (0.6, 0.4)),
        ([7], (), ()),
        ([100, None, 100, 50], (), balance_shares([100, 100, 100, 50])),  # unknown: the median
        ([100, 51], SKEWED, SKEWED),  # a small gain
        ([100, 80], SKEWED, (5 / 9, 4 / 9)),
        ([1000, 1, 1, 1], (), (MAX_SHARE / 4, 1 / 6, 1 / 6, 1 / 6)),
    ],
)
def test_shares(
    speeds: list[float | None], now: tuple[float, ...], shares: tuple[float, ...]
) -> None:
    assert balance_shares(speeds, now) == pytest.approx(shares)


def test_samples_follow_shares_of_at_least_the_smallest() -> None:
    assert samples_per_rank(12, 2, SKEWED) == (8, 4)
    assert balance_shares([100, 100, 100, 0.1])[3] == pytest.approx(MIN_SHARE / 4)


@given(SPEEDS)
def test_shares_are_bounded_and_improve_step_time(measured: list[float | None]) -> None:
    shares = balance_shares(measured)
    if not shares:
        return
    assert sum(shares) == pytest.approx(1)
    even = 1 / len(measured)
    assert all(MIN_SHARE * even * 0.999 <= share <= MAX_SHARE * even * 1.001 for share in shares)
    median = statistics.median(speed for speed in measured if speed)
    speeds = [speed or median for speed in measured]
    even_time = slowest((even,) * len(measured), speeds)
    assert slowest(shares, speeds) < even_time * (1 - MIN_GAIN) * 1.001
    assert balance_shares(measured, shares) == shares
