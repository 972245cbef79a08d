"""The snapshot that the page and `rayzero top` display: ranks, roles, rollouts, streams."""

from __future__ import annotations

import json
from math import isfinite, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.orchestrator.facts import MAX_ENTRIES
from rayzero.orchestrator.job_events import (
    FaultDetected,
    RoleFault,
    RoleWorkerEnded,
    RolloutsCounted,
)
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.metrics.curves import Curve
from rayzero.orchestrator.metrics.role_table import MAX_ROLE_VALUES, RoleTable
from rayzero.orchestrator.metrics.snapshot import make_snapshot, snapshot_ranks
from rayzero.orchestrator.metrics.snapshot_model import validate_snapshot
from rayzero.orchestrator.metrics.stream_table import MAX_SOURCES, StreamTable
from rayzero.orchestrator.progress import JobProgress, StepRecord
from rayzero.workers.messages import RoleReport, StepReport
from rayzero.workers.rollouts.counts import RolloutCounts
from rayzero.workers.spread import Spread
from rayzero.workers.step_rows import combine
from tests.orchestrator.metrics.simulated_job import UNIX, WORKER, SimulatedJob, eventful_job


def test_snapshot_is_json_with_history_of_job():
    new = SimulatedJob()
    snapshot = make_snapshot(new.metrics)
    assert (snapshot["state"], snapshot["loss"]) == ("pending", [])
    assert snapshot["progress"]["remaining_s"] is None
    json.dumps(snapshot, allow_nan=False)
    job = eventful_job()
    value = {**make_snapshot(job.metrics), "ranks": snapshot_ranks(job.metrics.ranks)}
    snapshot = json.loads(json.dumps(value, allow_nan=False))
    assert (snapshot["job"], snapshot["state"], snapshot["generation"]) == ("gpt", "running", 3)
    assert snapshot["workers"] == {"min": 1, "max": 4}
    assert (snapshot["progress"]["step"], snapshot["progress"]["steps"]) == (3, 100)
    assert snapshot["training"]["loss"] is None  # nan
    assert snapshot["loss"] == [[1, 2.5], [2, 2.5], [3, None]]  # step 2 was recomputed
    assert [entry["world_size"] for entry in snapshot["generations"]] == [2, 1, 1, 1]
    assert [entry["kind"] for entry in snapshot["recoveries"]] == ["repair", "resize"]
    assert snapshot["faults"] == [
        {"at_s": UNIX + 108, "cause": "lost", "rank": 1, "step": 3, "text": "rank 1 was lost"}
    ]
    (rank,) = snapshot["ranks"]
    assert (rank["rank"], rank["node"], rank["phase"]) == (0, "host-a", "forward")
    assert [entry["step"] for entry in snapshot["checkpoints"]] == [2]
    goodput = snapshot["goodput"]
    assert (
        abs(sum(goodput["seconds"].values()) + goodput["unattributed_s"] - goodput["wall_s"]) < 1e-6
    )


def test_snapshot_of_long_job_is_bounded():
    job = SimulatedJob()
    job.form(1, 1, 0)
    for step in range(1, 3000):
        job.now_s += 1
        job.step(step, 1, 1)
        job.emit(FaultDetected("lost", WORKER, 1, step, "again"))
        job.enter(State.RUNNING, 1, 1)
    snapshot = make_snapshot(job.metrics)
    assert len(snapshot["faults"]) == len(snapshot["generations"]) == MAX_ENTRIES
    assert snapshot["faults"][-1]["step"] == 2999
    assert len(snapshot["loss"]) <= 512
    assert snapshot["loss"][0][0] == 1
    assert snapshot["loss"][-1][0] > 2990


def test_page_shows_ranks_that_are_left_until_next_generation():
    job = SimulatedJob()
    job.form(1, 4, 0)
    at_s = []
    for cause, rank in (("collective", 0), ("lost", 1), ("lost", 1), ("node", 3), ("lost", None)):
        job.now_s += 1
        at_s.append(UNIX + job.now_s)
        job.emit(FaultDetected(cause, WORKER, rank, 3, "text"))
    job.form(2, 2, 3)
    entries = make_snapshot(job.metrics)["generations"]
    formed = [(it["generation"], it["world_size"]) for it in entries]
    assert formed == [(1, 4), (1, 3), (1, 2), (2, 2)]
    assert [it["at_s"] for it in entries[1:3]] == [at_s[1], at_s[3]]


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(-9, 9) | st.just(nan)), max_size=300))
def test_curve_keeps_every_extreme_within_its_bound(gaps: list[tuple[int, float]]):
    curve, step, points = Curve(8), 0, []
    for gap, value in gaps:
        step += gap
        curve.add(step, value)
        points.append((step, value))
        if step % 3 == 0:
            curve.rows()  # keeps those of complete buckets
    rows = [
        row if len(row) == 5 else [*row, row[1], row[1], int(row[1] is None)]
        for row in curve.rows()
    ]
    assert len(rows) <= 8
    begins = [*(row[0] for row in rows), step + 1]
    for (first, mean, low, high, nonfinite), after in zip(rows, begins[1:], strict=True):
        inside = [value for at, value in points if first <= at < after]
        finite = [value for value in inside if isfinite(value)]
        assert nonfinite == len(inside) - len(finite)
        if not finite:
            assert (mean, low, high) == (None, None, None)
            continue
        expected = (sum(finite) / len(finite), min(finite), max(finite))
        assert (mean, low, high) == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert rows == [] or (rows[0][0], begins[-1]) == (points[0][0], points[-1][0] + 1)


def test_redone_steps_replace_earlier_ones():
    curve = Curve()
    for x in (1, 2, 3, 4):
        curve.add(x, 1.0)
    assert curve.rows() == [[1, 1.0], [2, 1.0], [3, 1.0], [4, 1.0]]
    curve.add(3, 2.0)
    assert curve.rows() == [[1, 1.0], [2, 1.0], [3, 2.0]]


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


def record(step: int, step_s: float = 0.5, **counts: float) -> StepRecord:
    gauges = {f"streams/{name}": number for name, number in counts.items()}
    return StepRecord(step, 2, 1, None, 0.0, step_s, gauges)


def test_counters_of_ranks_are_added_up_and_a_step_that_is_not_finished_is_not_counted() -> None:
    progress = JobProgress()
    progress.start_generation(1, 2)
    for rank, samples in ((0, 3.0), (1, 4.0)):
        counters = {"tokens": 10.0, "streams/web/samples": samples}
        report = StepReport(1, rank, 1, counters, {"step_s": 0.5, "lr": 0.1})
        made = progress.add_rows(combine([rank], [report]))
    assert made is not None
    assert (made.tokens, made.gauges) == (20.0, {"lr": 0.1, "streams/web/samples": 7.0})
    assert not dict(made.user_gauges())
    progress.add_rows(combine([0], [StepReport(1, 0, 2, {"streams/web/samples": 3.0}, {})]))
    assert progress.start_generation(2, 1, 1) == []


def test_rates_are_smooth_and_shares_of_the_newest_step() -> None:
    table = StreamTable()
    for step in range(1, 201):  # a block of 800 bytes in every eighth step
        amounts = {"a/b/samples": 6.0, "c/samples": 2.0, "a/b/bytes": 800.0 * (step % 8 == 0)}
        curves = table.add_step(record(step, **amounts))
    assert curves["streams/a/b/samples_per_s"].mean == pytest.approx(12)
    assert curves["streams/c/samples_per_s"].mean == pytest.approx(4)
    assert curves["streams/a/b/bytes_per_s"].mean == pytest.approx(200, rel=0.5)
    assert table.by_source["a/b"].share == 0.75
    assert table.by_source["a/b"].totals == {"samples": 1200, "bytes": 800 * 25}
    assert table.by_source["c"].hit_ratio is None


def test_number_of_sources_is_bounded() -> None:
    table = StreamTable()
    table.add_step(record(1, **{f"{number}/samples": 1.0 for number in range(300)}))
    assert len(table.by_source) == MAX_SOURCES
    assert table.by_source["0"].share == pytest.approx(1 / 300)


def test_snapshot_has_the_sources() -> None:
    snapshot = make_snapshot(eventful_job().metrics)
    validate_snapshot(snapshot | {"ranks": []}, "the snapshot")
    assert snapshot["streams"]["web"]["hit_ratio"] == 1.0
    assert snapshot["streams"]["s3://b/code"]["share"] == 0.25
    assert snapshot["progress"]["data_wait_ratio"] == 0.25
    assert make_snapshot(SimulatedJob().metrics)["streams"] == {}
