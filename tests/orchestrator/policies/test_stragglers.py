"""Who is steadily slow: said once, and once more when it is over."""

from __future__ import annotations

from rayzero.orchestrator.policies.stragglers import WINDOW_STEPS, SpeedChange, SpeedTracker


def run(
    speed: SpeedTracker, steps: int, times: dict[int, float], samples: float = 4
) -> list[SpeedChange]:
    said = []
    for _ in range(steps):
        for worker, compute_s in times.items():
            change = speed.add_step(worker, compute_s, samples)
            said += [change] if change else []
    return said


def test_equal_workers_say_nothing() -> None:
    assert run(SpeedTracker(), 200, {0: 0.1, 1: 0.11, 2: 0.12}) == []


def test_a_slow_worker_is_told_once_and_once_when_it_is_over() -> None:
    speed = SpeedTracker()
    times = {0: 0.10, 1: 0.10, 2: 0.15}
    assert run(speed, WINDOW_STEPS, times) == []  # not at the first sight
    (told,) = run(speed, 200, times)
    assert (told.worker, told.slow) == (2, True)
    assert str(told) == (
        "worker 2 is 1.5 times slower than the others: 0.150 s per step, the others 0.100 s"
    )
    (over,) = run(speed, 200, {**times, 2: 0.1})
    assert (over.worker, over.slow) == (2, False)
    assert "no longer slow" in str(over)
    (again,) = run(speed, 200, times)
    assert again.slow


def test_the_limit_is_1_3() -> None:
    assert run(SpeedTracker(), 200, {0: 1.0, 1: 1.29}) == []
    assert len(run(SpeedTracker(), 200, {0: 1.0, 1: 1.31})) == 1


def test_outliers_say_nothing() -> None:
    speed = SpeedTracker()
    for _ in range(30):
        assert run(speed, 9, {0: 0.1, 1: 0.1}) == []
        assert run(speed, 4, {0: 0.1, 1: 5.0}) == []


def test_one_worker_alone_is_never_slow() -> None:
    assert run(SpeedTracker(), 100, {0: 3.0}) == []


def test_workers_are_remembered_over_generations_and_measured_anew() -> None:
    speed = SpeedTracker()
    speed.start_generation([0, 1, 2])
    assert len(run(speed, 100, {0: 0.1, 1: 0.1, 2: 0.2})) == 1
    speed.start_generation([0, 2, 3])
    assert speed.samples_per_s([0, 1, 2, 3]) == (40, None, 20, None)
    assert run(speed, 100, {0: 0.1, 2: 0.2, 3: 0.1}) == []  # told before


def test_speed_is_a_median_of_enough_steps() -> None:
    speed = SpeedTracker()
    run(speed, 5, {0: 0.1})
    assert speed.samples_per_s([0]) == (None,)
    run(speed, 5, {0: 0.1})
    speed.add_step(0, 9.0, 4)
    speed.add_step(0, 0.0, 4)  # not measured
    assert speed.samples_per_s([0]) == (40,)
