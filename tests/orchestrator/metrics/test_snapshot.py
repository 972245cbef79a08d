"""The snapshot that the page and `rayzero top` display."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rayzero.orchestrator.job_events import FaultDetected
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.metrics.history import MAX_HISTORY_ENTRIES, BoundedCurve
from rayzero.orchestrator.metrics.snapshot import make_snapshot, snapshot_ranks
from tests.orchestrator.metrics.simulated_job import UNIX, WORKER, SimulatedJob, eventful_job


def test_snapshot_is_json_with_history_of_job():
    job = eventful_job()
    value = {**make_snapshot(job.metrics), "ranks": snapshot_ranks(job.metrics.ranks)}
    snapshot = json.loads(json.dumps(value, allow_nan=False))
    assert (snapshot["job"], snapshot["state"], snapshot["generation"]) == ("gpt", "running", 3)
    assert snapshot["workers"] == {"min": 1, "max": 4}
    assert (snapshot["progress"]["step"], snapshot["progress"]["steps"]) == (3, 100)
    assert snapshot["training"]["loss"] is None  # nan
    assert snapshot["loss"] == [[1, 2.5], [2, 2.5], [3, None]]  # step 2 was recomputed
    assert [entry["world_size"] for entry in snapshot["generations"]] == [2, 1, 1]
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


def test_snapshot_of_new_job():
    job = SimulatedJob()
    snapshot = make_snapshot(job.metrics)
    assert (snapshot["state"], snapshot["loss"]) == ("pending", [])
    assert snapshot_ranks(job.metrics.ranks) == []
    assert snapshot["progress"]["remaining_s"] is None
    json.dumps(snapshot, allow_nan=False)


def test_snapshot_of_long_job_is_bounded():
    job = SimulatedJob()
    job.form(1, 1, 0)
    for step in range(1, 3000):
        job.now_s += 1
        job.step(step, 1, 1)
        job.emit(FaultDetected("lost", WORKER, 1, step, "again"))
        job.enter(State.RUNNING, 1, 1)
    snapshot = make_snapshot(job.metrics)
    assert len(snapshot["faults"]) == len(snapshot["generations"]) == MAX_HISTORY_ENTRIES
    assert snapshot["faults"][-1]["step"] == 2999
    assert len(snapshot["loss"]) <= 514
    assert snapshot["loss"][0][0] == 1
    assert snapshot["loss"][-1][0] == 2999


@given(st.integers(1, 400), st.integers(1, 20))
def test_downsampled_curve_keeps_ends_and_order(count: int, max_points: int):
    curve = BoundedCurve(max_points)
    for x in range(count):
        curve.add(x, float(x))
    points = curve.points()
    assert len(points) <= max_points + 1
    assert points == sorted(set(points))
    assert (points[0][0], points[-1][0]) == (0, count - 1)
    gaps = {after[0] - before[0] for before, after in pairwise(points[:-1])}
    assert len(gaps) <= 1  # evenly


def test_recomputed_points_replace_earlier_ones():
    curve = BoundedCurve()
    for x in (1, 2, 3, 4):
        curve.add(x, 1.0)
    curve.add(3, 2.0)
    assert curve.points() == [(1, 1.0), (2, 1.0), (3, 2.0)]
