"""What share of a step's samples each rank gets, when a generation begins and between steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.data.sampling import samples_per_rank
from rayzero.orchestrator.policies.balance import (
    MAX_SHARE,
    MIN_GAIN,
    MIN_SHARE,
    WINDOW_STEPS,
    Balancer,
    balance_shares,
    describe_shares,
)
from rayzero.orchestrator.policies.stragglers import SpeedTracker

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


class Job:
    """A job of ranks whose compute time is their samples over their speed, in virtual time."""

    def __init__(self, ranks: int, batch: int, *, overhead_s: float = 0.0) -> None:
        self.batch, self.overhead_s = batch, overhead_s
        self.members = tuple(range(ranks))
        self.tracker, self.balancer = SpeedTracker(), Balancer(enabled=True)
        self.shares: tuple[float, ...] = self.balancer.start_generation(
            self.members, [None] * ranks
        )
        self.changes: list[int] = []

    def run(self, steps: int, speeds: Sequence[float], latency_steps: int = 1) -> list[float]:
        """Makes steps; returns their times. Ranks begin to use new shares some steps later."""
        times, waiting = [], 0
        new: tuple[float, ...] = ()
        for step in range(steps):
            counts = samples_per_rank(self.batch, len(self.members), self.shares)
            micro_steps = -(-max(counts) // -(-self.batch // len(counts)))
            compute_s = [
                count / speed + micro_steps * self.overhead_s
                for count, speed in zip(counts, speeds, strict=True)
            ]
            times.append(max(compute_s))
            for rank, own_s in enumerate(compute_s):
                share = self.balancer.relative_share(rank, self.batch)
                self.tracker.add_step(rank, own_s / share)
            proposed = self.balancer.on_step_finished(times[-1], self.batch, self.speeds)
            if proposed:
                assert not new
                new, waiting = proposed, latency_steps
                continue
            waiting -= 1
            if new and waiting <= 0:
                self.balancer.on_divided(new)
                self.shares, new = new, ()
                self.changes.append(step)
        return times

    def speeds(self) -> Sequence[float | None]:
        return self.tracker.shares_per_s(self.members)


def test_rank_of_half_speed_costs_an_eighth_of_four_and_nothing_once_it_is_well() -> None:
    job = Job(4, 128)
    (usual_s,) = set(job.run(100, [1000] * 4))
    assert job.changes == []
    slow_s = job.run(100, [1000, 1000, 500, 1000])
    assert slow_s[0] == 2 * usual_s
    assert len(job.changes) == 1
    assert job.changes[0] <= 2 * WINDOW_STEPS
    assert usual_s / slow_s[-1] > 0.85  # 3.5 of 4 ranks, and rounding
    again_s = job.run(100, [1000] * 4)
    assert again_s[-1] == usual_s
    assert len(job.changes) == 2


def test_change_that_gains_nothing_is_undone_and_comes_later_again() -> None:
    """Faster ranks take two micro-batches then, which cost more than equal times save."""
    job = Job(4, 32, overhead_s=0.006)
    speeds = [1000, 1000, 800, 1000]
    usual_s = job.run(1, speeds)[0]
    times_s = job.run(1000, speeds)
    assert statistics.median(times_s) == usual_s
    assert max(times_s) > 1.2 * usual_s
    assert sum(times_s) < 1.06 * usual_s * len(times_s)
    gaps = [
        after - before for before, after in zip(job.changes[1::2], job.changes[2::2], strict=False)
    ]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 4 * gaps[0]


def test_ranks_that_cannot_are_asked_once_a_generation() -> None:
    job = Job(2, 64)
    job.run(500, [100, 50], latency_steps=1000)
    assert job.changes == []
    assert job.balancer.start_generation((0, 1), job.speeds()) == pytest.approx((2 / 3, 1 / 3))


@pytest.mark.parametrize("batch", [2, 3])
def test_shares_that_round_to_the_same_samples_are_left(batch: int) -> None:
    job = Job(2, batch)
    job.run(100, [100, 90])
    assert job.changes == []


@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=6),
    st.integers(16, 256),
)
def test_steps_are_at_most_as_long_as_even_ones(speeds: list[int], batch: int) -> None:
    job = Job(len(speeds), batch)
    times_s = job.run(10 * WINDOW_STEPS, speeds)
    assert times_s[-1] <= times_s[0] * 1.0001


def test_even_shares_without_the_setting() -> None:
    balancer = Balancer(enabled=False)
    assert balancer.start_generation((0, 1), [100, 50]) == ()
    never: Callable[[], list[float]] = lambda: pytest.fail("asked")  # noqa: E731
    assert not any(balancer.on_step_finished(1.0, 64, never) for _ in range(100))
    assert balancer.relative_share(1, 64) == 1


@pytest.mark.parametrize(
    ("shares", "text"),
    [
        ((2 / 7, 1 / 7, 4 / 7), "rank 1 has 0.43, rank 0 has 0.86 of an even share"),
        ((0.5, 0.5), "divided evenly again"),
        (
            (0.01,) * 20 + (0.8,),
            "rank 7 has 0.21 and 12 others less of an even share",
        ),
    ],
)
def test_shares_in_the_log(shares: tuple[float, ...], text: str) -> None:
    assert text in describe_shares(shares)
