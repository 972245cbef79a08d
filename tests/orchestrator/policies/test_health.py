"""Judgement of what nodes have measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.orchestrator.policies.health import CHECKS, best_of, describe, judge
from rayzero.workers.vault import health
from rayzero.workers.vault.health import HealthReport


def reports(name: str, *figures: float) -> dict[str, HealthReport]:
    return {str(node): HealthReport({name: figure}) for node, figure in enumerate(figures)}


@pytest.mark.parametrize(
    ("name", "figures", "failed"),
    [
        ("memory", (12, 12, 5.9), ["2"]),
        ("memory", (12, 12, 6), []),
        ("memory", (12, 1), []),
        ("compute", (50, 49, 51, 20, 100), ["3"]),
        ("network", (1, 1, 1, 0.3, 0.2), ["4"]),
        ("disk", (0.9, 1), ["0"]),
        ("clock", (0, 5, 5.1), ["2"]),
        ("gpu_xid/3", (79,), ["0"]),
        ("gpu_throttle/0", (0,), []),
        ("unknown", (0,), []),
    ],
)
def test_limits(name: str, figures: tuple[float, ...], failed: list[str]) -> None:
    assert list(judge(reports(name, *figures), 0.5)) == failed


def test_text_has_figure_limit_origin_and_fix() -> None:
    failed = judge(reports("memory", 12, 12, 3.1, 12), 0.5)
    assert describe(failed["2"]) == (
        "memory bandwidth 3.1 GB/s, limit 6 GB/s (0.5 of the median of 4 nodes); "
        "fix: look for missing memory modules or a noisy neighbour"
    )
    assert failed["2"][0].is_relative
    broken = judge({"a": HealthReport(errors={"disk": "Input/output error"})}, 0.5)
    assert describe(broken["a"]).startswith("free disk space: Input/output error; fix: free ")


@given(st.lists(st.floats(1, 2), min_size=1, max_size=9), st.floats(0.1, 0.5))
def test_nodes_within_a_factor_of_two_are_never_slow(figures: list[float], factor: float) -> None:
    assert judge(reports("memory", *figures), factor) == {}


def test_a_node_is_as_fast_as_its_best_measurement_and_the_newer_one_has_the_rest() -> None:
    first = HealthReport({"memory": 9.0, "compute": 1.0, "disk": 7.0})
    second = HealthReport({"memory": 2.0, "disk": 0.1}, incomplete="no answer", unix_s=5.0)
    expected = HealthReport({"memory": 9.0, "compute": 1.0, "disk": 0.1}, {}, "no answer", 5.0)
    assert best_of(first, second) == expected


def test_every_figure_of_the_probe_has_a_check() -> None:
    check = health.HealthCheck()
    check.begin(60)
    while (report := check.report()) is None:
        assert check._thread is not None
        check._thread.join(60)
    assert {name.partition("/")[0] for name in report.figures} <= CHECKS.keys()
    assert judge({"here": report}, 0.5) == {}, "this machine is well"


def test_fixes_begin_with_a_verb() -> None:
    verbs = {"look", "free", "raise", "synchronize", "drain", "reset"}
    assert {check.fix.split()[0] for check in CHECKS.values()} <= verbs
