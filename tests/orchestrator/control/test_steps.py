"""What the ranks' reports of a step lead to: `StepReports`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from rayzero.orchestrator.control.steps import StepReports
from rayzero.orchestrator.policies.balance import Balancer
from rayzero.orchestrator.progress import StepRecord
from rayzero.workers.calls import WorkerCalls
from rayzero.workers.messages import Divided

SHARES = (0.25, 0.75)


def make_reports(*, fenced: bool = False) -> Any:
    generation = SimpleNamespace(
        number=2, assignments={0: None, 1: None}, fenced=fenced, active=frozenset({0, 1})
    )
    parts: Any = {name: Mock() for name in StepReports.__dataclass_fields__}
    balancer = Balancer(enabled=True)
    balancer.start_generation((0, 1), (None, None))
    parts |= {"_members": SimpleNamespace(generation=generation), "_balancer": balancer}
    reports: Any = StepReports(**parts)
    return reports


@pytest.mark.parametrize(("generation", "share"), [(2, 1.5), (1, 1.0)])
def test_shares_count_once_the_ranks_of_this_generation_use_them(generation: int, share: float):
    reports = make_reports()
    reports.on_divided(0, Divided(generation, 0, SHARES))
    assert reports._balancer.relative_share(1, 8) == share
    told = ["samples follow speed: rank 0 has 0.50 of an even share"] * (generation == 2)
    assert [call.args[0] for call in reports._events.warn.call_args_list] == told


@pytest.mark.parametrize("fenced", [False, True])
def test_new_shares_are_sent_to_the_ranks_that_train(fenced: bool):
    reports = make_reports(fenced=fenced)
    reports._speeds.samples_per_s.return_value = (100, 300)
    for step in range(1, 100):
        reports._balance(StepRecord(step, 2, 2, None, 0.0, 1.0, {"step_samples": 128.0}))
    calls = [call.args for call in reports._calls.broadcast.call_args_list]
    assert len(calls) == (not fenced)
    for workers, command, generation, shares in calls:
        assert (workers, command, generation) == ({0, 1}, WorkerCalls.divide, 2)
        assert shares == pytest.approx(SHARES)
