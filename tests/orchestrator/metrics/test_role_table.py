"""What roles report, and what the buffer holds, as curves over the job's steps."""

from __future__ import annotations

import pytest

from rayzero.orchestrator.job_events import RoleFault, RoleWorkerEnded, RolloutsCounted
from rayzero.orchestrator.metrics.role_table import MAX_ROLE_VALUES, RoleTable
from rayzero.orchestrator.metrics.snapshot import make_snapshot
from rayzero.orchestrator.metrics.snapshot_model import validate_snapshot
from rayzero.workers.messages import RoleReport
from rayzero.workers.rollouts.counts import RolloutCounts
from rayzero.workers.spread import Spread
from tests.orchestrator.metrics.simulated_job import WORKER, SimulatedJob, eventful_job


def counted(wait_s: float, **changes: float) -> RolloutsCounted:
    values = {"waiting": (5, 0), "leased": (2, 1), "ready": 3, "read": 8, "published": 2}
    values |= {"nbytes": 1, "max_bytes": 9, "max_version_lag": 2, "lag_mean": 0.5, "lag_max": 2}
    counts = RolloutCounts(**{**values, "expired": (0, 0), "wait_s": (wait_s, 0.0), **changes})  # type: ignore[arg-type]
    return RolloutsCounted(counts, ("rollout", "reward"))


def reward(number: int, *values: float, tokens: float = 0.0) -> RoleReport:
    spread = Spread(len(values), sum(values), min(values), max(values))
    return RoleReport("rollout", number, {"reward": spread}, tokens)


def test_values_of_a_step_have_their_mean_and_spread_over_all_workers():
    table = RoleTable()
    table.on_report(reward(0, 0.0, 1.0, tokens=30))
    table.on_report(reward(1, 5.0, tokens=70))
    values = table.take_step(step_s=2.0)
    assert values["roles/rollout/reward"] == Spread(3, 6.0, 0.0, 5.0)
    assert values["roles/rollout/tokens_per_s"].mean == 50
    assert table.by_role["rollout"].values["reward"].mean == 5, "the newest report"
    table.on_report(reward(1, 7.0))
    values = table.take_step(step_s=1.0)
    assert values["roles/rollout/reward"] == Spread(1, 7.0, 7.0, 7.0)
    assert values["roles/rollout/tokens_per_s"].mean == 0
    assert "roles/rollout/reward" not in table.take_step(step_s=1.0)


def test_waits_are_those_since_the_last_step_also_of_another_buffer():
    table = RoleTable()
    table.on_counts(counted(10.0))
    assert table.take_step(1.0)["roles/rollout/task_wait_s"].mean == 10
    table.on_counts(counted(12.5))
    assert table.take_step(1.0)["roles/rollout/task_wait_s"].mean == 2.5
    table.on_counts(counted(1.0))
    values = table.take_step(1.0)
    assert values["roles/rollout/task_wait_s"].mean == 1
    assert (values["rollouts/ready"].mean, values["rollouts/leased"].mean) == (3, 3)
    assert (values["rollouts/lag"].mean, values["rollouts/lag"].high) == (0.5, 2)


def test_version_of_a_worker_that_is_gone_does_not_count():
    job = eventful_job()
    values = job.metrics.roles.by_role["rollout"]
    assert values.oldest_version == 2
    job.emit(RoleFault("rollout", 1, "lost", WORKER, "killed", 1))
    assert values.oldest_version == 3
    job.emit(RoleWorkerEnded("rollout", 0, 0))
    assert values.oldest_version is None


def test_names_of_values_are_bounded():
    table = RoleTable()
    for number in range(MAX_ROLE_VALUES + 9):
        table.on_report(RoleReport("a", 0, {f"name{number}": Spread(1, 0.0, 0.0, 0.0)}))
    assert len(table.by_role["a"].values) == MAX_ROLE_VALUES


def test_curve_of_a_step_has_the_spread():
    job = SimulatedJob()
    job.form(1, 1, 0)
    job.metrics.roles.on_report(reward(0, 1.0, 2.0))
    job.step(1, 1, 1)
    rows = job.metrics.curves.rows()
    assert rows["roles/rollout/reward"] == [[1, 1.5, 1.0, 2.0, 0]]
    job.metrics.curves.restore(rows)
    assert job.metrics.curves.rows()["roles/rollout/reward"] == [[1, 1.5, 1.0, 2.0, 0]]


def test_snapshot_has_roles_and_rollouts():
    value = make_snapshot(eventful_job().metrics)
    role, rollouts = value["roles"]["rollout"], value["rollouts"]
    assert [size["world_size"] for size in role["generations"]] == [1, 2, 1]
    assert [fault["cause"] for fault in role["seen_faults"]] == ["lost"]
    assert role["values"]["reward"] == {"mean": 0.5, "low": 0.0, "high": 1.0}
    assert rollouts["leased"] == {"rollout": 2}
    assert rollouts["wait_s"] == pytest.approx({"rollout": 7.5})
    validate_snapshot({**value, "ranks": []}, "it")
