"""The board shows all values of a snapshot, at any width, without interpreting its text."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
import rich.console
from hypothesis import given
from hypothesis import strategies as st

from rayzero.orchestrator.top.board import render_board, snapshot_line
from rayzero.orchestrator.top.format import (
    format_duration,
    format_size,
    sparkline,
    split_width,
)
from tests.orchestrator.page.sample import empty, sample


def rendered(snapshot: dict[str, Any], width: int = 110, error: str | None = None) -> str:
    out = StringIO()
    console = rich.console.Console(file=out, width=width, force_terminal=True, color_system=None)
    console.print(render_board(snapshot, error))
    return out.getvalue()


def test_board_shows_all_values() -> None:
    text = " ".join(rendered(sample(), error="no contact for 5 s: gone").split())
    for part in (
        "no contact for 5 s",
        "gpt-stdlib",
        "running",
        "ZeRO stage 2",
        "12,345/20,000",
        "41 min 21 s",
        "81,920",
        "4 (of 2 to 4)",
        "2.346",
        "90.2%",
        "redone 41 s",
        "3 update silent 14 s",
        "2 reduce (waiting)",
        "lost",
        "repaired",
        "resized",
        "1 fault",
        "step 10,000, 2.98 GiB in 4.2 s",
        "1 failed write attempts",
        "rollout 3 (of 1 to 4)",
        "tasks in flight 6",
        "oldest weights 12,343",
        "41,237",
        "reward 0.6172",
        "version 12,344",
        "ready prompts 21",
        "rollout 1 on node a hangs",
        "found in memory",
        "books 10.0%",
        "waiting for data 3.1% of a step",
    ):
        assert part in text, part


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("snapshot", [sample(), empty(), sample(ranks=1), sample(ranks=1000)])
def test_board_fits_width(snapshot: dict[str, Any], width: int) -> None:
    lines = rendered(snapshot, width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) < 100
    if len(snapshot["ranks"]) == 1000:  # counted by phase
        assert any("backward 167" in line for line in lines)


def test_escape_sequences_and_markup_have_no_effect() -> None:
    now = sample()
    nasty = "\x1b]0;owned\x07[bold]x[/bold][/]"
    now |= {"job": nasty, "version": nasty}
    now["faults"][0] |= {"cause": nasty, "text": nasty}
    now["ranks"][0] |= {"phase": nasty, "node": nasty}
    now["goodput"]["seconds"][nasty] = 4.0
    text = rendered(now)
    assert "\x1b]" not in text
    assert "[bold]x[/bold][/]" in text
    assert "\x1b" not in snapshot_line(now)


def test_job_that_queues_says_what_it_waits_for() -> None:
    queueing = empty() | {"waiting_for": "2 CPUs: held by job a (2 CPUs)"}
    assert "waiting for 2 CPUs: held by job a (2 CPUs)" in rendered(queueing)
    assert "step 0, waiting for 2 CPUs: held by job a" in snapshot_line(queueing)


def test_line_has_main_values() -> None:
    assert snapshot_line(sample()) == (
        "gpt-stdlib: running, step 12,345/20,000, loss 2.3457, 81,920 tokens/s, 4 ranks, "
        "goodput 90.2%, 1 fault, 41 min 21 s left"
    )
    assert snapshot_line(empty()) == "gpt-stdlib: pending, step 0, 0 ranks, goodput 0.0%"


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
