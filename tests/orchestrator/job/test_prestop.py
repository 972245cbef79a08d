"""The head's hook where a head comes back: only the end of all nodes stops jobs."""

from __future__ import annotations

import pytest

from rayzero.orchestrator.job import prestop


@pytest.mark.parametrize(
    ("nodes", "draining", "leaves"),
    [
        ({"head"}, [set()], True),
        ({"head", "a", "b"}, [set(), {"a"}, {"a", "b"}], True),
        ({"head", "a", "b"}, [{"a"}] * 99, False),
        ({"head", "a"}, [{"head"}] * 99, False),
    ],
)
def test_jobs_are_stopped_only_if_all_other_nodes_leave(
    monkeypatch: pytest.MonkeyPatch, nodes: set[str], draining: list[set[str]], leaves: bool
) -> None:
    answers, now_s = iter(draining), 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(prestop, "node_capacities", lambda: dict.fromkeys(nodes))
    monkeypatch.setattr(prestop, "head_node_id", lambda: "head")
    monkeypatch.setattr(prestop, "draining_node_ids", lambda: next(answers))
    monkeypatch.setattr(prestop, "monotonic", lambda: now_s)
    monkeypatch.setattr(prestop, "sleep", sleep)
    assert prestop.all_nodes_leave(5.0) == leaves
    assert now_s <= 5.5
