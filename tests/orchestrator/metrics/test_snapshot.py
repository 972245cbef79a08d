"""The snapshot that the page and `rayzero top` display."""

from __future__ import annotations

import json
from math import isfinite, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.orchestrator.facts import MAX_ENTRIES
from rayzero.orchestrator.job_events import FaultDetected
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.metrics.curves import Curve
from rayzero.orchestrator.metrics.snapshot import make_snapshot, snapshot_ranks
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
