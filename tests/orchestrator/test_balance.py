"""Shares by speed: bounds, gain, and what is not known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.data.split import rank_samples
from rayzero.orchestrator.policies.balance import GAIN, LEAST, MOST, balanced

SPEEDS = st.lists(st.none() | st.floats(0.01, 1000), min_size=1, max_size=12)


def slowest(shares: tuple[float, ...], speeds: list[float]) -> float:
    return max(share / speed for share, speed in zip(shares, speeds, strict=True))


def test_shares_follow_speed() -> None:
    assert balanced([100, 50]) == pytest.approx((2 / 3, 1 / 3))
    assert rank_samples(12, 2, balanced([100, 50])) == (8, 4)


def test_equal_speeds_and_unknown_ones_stay_even() -> None:
    assert balanced([10, 10.2, 9.9]) == ()
    assert balanced([None, None]) == ()
    assert balanced([None, None], (0.6, 0.4)) == (0.6, 0.4)
    assert balanced([7]) == ()


def test_an_unknown_speed_is_the_median_of_the_known() -> None:
    assert balanced([100, None, 100, 50]) == pytest.approx(balanced([100, 100, 100, 50]))


def test_little_gain_changes_nothing() -> None:
    now = balanced([100, 50])
    assert balanced([100, 51], now) == now
    assert balanced([100, 80], now) == pytest.approx((5 / 9, 4 / 9))


def test_bounds() -> None:
    shares = balanced([1000, 1, 1, 1])
    assert shares == pytest.approx((MOST / 4, 1 / 6, 1 / 6, 1 / 6))
    shares = balanced([100, 100, 100, 0.1])
    assert shares[3] == pytest.approx(LEAST / 4)


@given(SPEEDS)
def test_shares_are_shares_within_bounds_and_worth_it(known: list[float | None]) -> None:
    shares = balanced(known)
    if not shares:
        return
    assert sum(shares) == pytest.approx(1)
    even = 1 / len(known)
    assert all(LEAST * even * 0.999 <= share <= MOST * even * 1.001 for share in shares)
    speeds = [speed for speed in known if speed]
    middle = sorted(speeds)[len(speeds) // 2], sorted(speeds)[(len(speeds) - 1) // 2]
    filled = [speed or sum(middle) / 2 for speed in known]
    now = slowest((even,) * len(known), filled)
    assert slowest(shares, filled) < now * (1 - GAIN) * 1.001
    assert balanced(known, shares) == shares  # and they stay
