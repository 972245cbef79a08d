"""What a role's function reports between two polls."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
import torch

from rayzero.engine.errors import EngineError
from rayzero.workers.messages import RoleReport
from rayzero.workers.roles.reporter import RoleReporter
from rayzero.workers.spread import Spread


def test_report_is_of_what_came_since_the_last_one():
    reporter = RoleReporter()
    assert reporter.take("rollout", 2) == []
    for reward in (0.0, torch.tensor([3.0])):
        reporter.add({"reward": reward, "tokens": 10})
    reporter.add_refresh(7, 0.25)
    values = {"reward": Spread(2, 3.0, 0.0, 3.0)}
    assert reporter.take("rollout", 2) == [RoleReport("rollout", 2, values, 20.0, 7, 0.25)]
    assert reporter.take("rollout", 2) == []


def test_threads_of_the_function_lose_nothing():
    reporter, reports = RoleReporter(), list[RoleReport]()
    threads = [
        Thread(target=lambda: [reporter.add({"a": 1, "tokens": 1}) for _ in range(2000)])
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        reports += reporter.take("rollout", 0)
    reports += reporter.take("rollout", 0)
    assert sum(report.tokens for report in reports) == 6000
    assert sum(report.values["a"].count for report in reports if report.values) == 6000


@pytest.mark.parametrize("metrics", [{"a": "high"}, {"phases/a": 1}, {"": 1}, {"a": [1, 2]}])
def test_wrong_values_are_errors_and_change_nothing(metrics: dict[str, Any]):
    reporter = RoleReporter()
    with pytest.raises(EngineError, match=r"ctx\.report"):
        reporter.add({"good": 1, **metrics})
    assert reporter.take("rollout", 0) == []
