"""Which workers are slow."""

from __future__ import annotations

import pytest

from rayzero.orchestrator.policies.stragglers import WINDOW_STEPS, SpeedTracker


def run(tracker: SpeedTracker, steps: int, times: dict[int, float]) -> list[str]:
    """The messages."""
    messages = [
        tracker.add_step(worker, compute_s)
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
    assert tracker.shares_per_s([0, 1, 2, 3]) == (10, None, 5, None)
    assert run(tracker, 100, {0: 0.1, 2: 0.2, 3: 0.1}) == []  # reported before


def test_speed_is_median_of_enough_steps() -> None:
    tracker = SpeedTracker()
    run(tracker, 5, {0: 0.1})
    assert tracker.shares_per_s([0]) == (None,)
    run(tracker, 5, {0: 0.1})
    tracker.add_step(0, 9.0)
    tracker.add_step(0, 0.0)  # not measured
    assert tracker.shares_per_s([0]) == (10,)
