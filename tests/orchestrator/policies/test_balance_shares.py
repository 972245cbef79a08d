"""Sample shares by speed: bounds, gain and unknown speeds."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.data.sampling import samples_per_rank
from rayzero.orchestrator.policies.stragglers import MAX_SHARE, MIN_GAIN, MIN_SHARE, balance_shares

SPEEDS = st.lists(st.none() | st.floats(0.01, 1000), min_size=1, max_size=12)


def slowest(shares: tuple[float, ...], speeds: list[float]) -> float:
    return max(share / speed for share, speed in zip(shares, speeds, strict=True))


def test_shares_follow_speed() -> None:
    assert balance_shares([100, 50]) == pytest.approx((2 / 3, 1 / 3))
    assert samples_per_rank(12, 2, balance_shares([100, 50])) == (8, 4)


def test_equal_or_unknown_speeds_give_even_shares() -> None:
    assert balance_shares([10, 10.2, 9.9]) == ()
    assert balance_shares([None, None]) == ()
    assert balance_shares([None, None], (0.6, 0.4)) == (0.6, 0.4)
    assert balance_shares([7]) == ()


def test_unknown_speed_defaults_to_median() -> None:
    assert balance_shares([100, None, 100, 50]) == pytest.approx(
        balance_shares([100, 100, 100, 50])
    )


def test_small_gain_keeps_shares() -> None:
    now = balance_shares([100, 50])
    assert balance_shares([100, 51], now) == now
    assert balance_shares([100, 80], now) == pytest.approx((5 / 9, 4 / 9))


def test_bounds() -> None:
    shares = balance_shares([1000, 1, 1, 1])
    assert shares == pytest.approx((MAX_SHARE / 4, 1 / 6, 1 / 6, 1 / 6))
    shares = balance_shares([100, 100, 100, 0.1])
    assert shares[3] == pytest.approx(MIN_SHARE / 4)


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
