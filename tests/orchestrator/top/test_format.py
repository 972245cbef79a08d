"""Numbers and curves in few characters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.orchestrator.top.format import (
    format_duration,
    format_size,
    sparkline,
    split_width,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (-1, "0 ms"),
        (0.0123, "12 ms"),
        (0.9996, "1 s"),
        (1.5, "1.5 s"),
        (59.7, "1 min"),
        (61, "1 min 1 s"),
        (3600, "1 h"),
        (3661, "1 h 1 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_duration_has_its_two_largest_units(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text


def test_size_has_binary_unit() -> None:
    assert [*map(format_size, (None, 0, 1023, 2**30 * 1.5))] == ["-", "0 B", "1023 B", "1.5 GiB"]


def test_sparkline_scales_from_lowest_to_highest_value() -> None:
    assert sparkline([0.0, 1.0, 2.0, 3.5, 7.0], 5) == "▁▂▃▅█"
    assert sparkline([5.0, 5.0], 10) == "▁▁"
    assert sparkline([1.0, None, 2.0], 3) == "▁ █"
    assert sparkline([], 5) == sparkline([None], 5) == ""
    assert len(sparkline([-1e9, None, 1e9] * 100, 80)) == 80


@given(st.lists(st.floats(0, 1e9), max_size=20), st.integers(1, 200))
def test_columns_fill_width_in_proportion(values: list[float], width: int) -> None:
    split = split_width(values, width)
    assert sum(split) == (width if sum(values) > 0 else 0)
    for value, columns in zip(values, split, strict=True):
        if sum(values) > 0:
            assert abs(columns - value / sum(values) * width) <= 1
