"""The one value that a page and a terminal are made from."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rayzero.orchestrator.job_events import FaultDetected
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.metrics.history import MAX_HISTORY_ENTRIES, BoundedCurve
from rayzero.orchestrator.metrics.snapshot import make_snapshot, snapshot_ranks
from tests.orchestrator.metrics.jobs import UNIX, WORKER, Life, lived


def test_it_is_json_and_tells_the_jobs_life():
    life = lived()
    value = {**make_snapshot(life.tally), "ranks": snapshot_ranks(life.tally.ranks)}
    told = json.loads(json.dumps(value, allow_nan=False))
    assert (told["job"], told["state"], told["generation"]) == ("gpt", "running", 3)
    assert told["workers"] == {"min": 1, "max": 4}
    assert (told["progress"]["step"], told["progress"]["steps"]) == (3, 100)
    assert told["training"]["loss"] is None  # nan
    assert told["loss"] == [[1, 2.5], [2, 2.5], [3, None]]  # step 2 was done again
    assert [one["world_size"] for one in told["generations"]] == [2, 1, 1]
    assert [one["kind"] for one in told["recoveries"]] == ["repair", "resize"]
    assert told["faults"] == [
        {"at_s": UNIX + 108, "cause": "lost", "rank": 1, "step": 3, "text": "rank 1 was lost"}
    ]
    (rank,) = told["ranks"]
    assert (rank["rank"], rank["node"], rank["phase"]) == (0, "host-a", "forward")
    assert [one["step"] for one in told["checkpoints"]] == [2]
    goodput = told["goodput"]
    assert (
        abs(sum(goodput["seconds"].values()) + goodput["unattributed_s"] - goodput["wall_s"]) < 1e-6
    )


def test_before_anything_happened():
    life = Life()
    told = make_snapshot(life.tally)
    assert (told["state"], told["loss"]) == ("pending", [])
    assert snapshot_ranks(life.tally.ranks) == []
    assert told["progress"]["remaining_s"] is None
    json.dumps(told, allow_nan=False)


def test_a_job_with_many_faults_and_steps_stays_small():
    life = Life()
    life.form(1, 1, 0)
    for step in range(1, 3000):
        life.now_s += 1
        life.step(step, 1, 1)
        life.see(FaultDetected("lost", WORKER, 1, step, "again"))
        life.enter(State.RUNNING, 1, 1)
    told = make_snapshot(life.tally)
    assert len(told["faults"]) == len(told["generations"]) == MAX_HISTORY_ENTRIES
    assert told["faults"][-1]["step"] == 2999
    assert len(told["loss"]) <= 514
    assert told["loss"][0][0] == 1
    assert told["loss"][-1][0] == 2999


@given(st.integers(1, 400), st.integers(1, 20))
def test_a_curve_keeps_its_ends_its_order_and_its_bound(count: int, most: int):
    curve = BoundedCurve(most)
    for x in range(count):
        curve.add(x, float(x))
    points = curve.points()
    assert len(points) <= most + 1
    assert points == sorted(set(points))
    assert (points[0][0], points[-1][0]) == (0, count - 1)
    gaps = {after[0] - before[0] for before, after in pairwise(points[:-1])}
    assert len(gaps) <= 1  # evenly


def test_what_is_done_again_replaces_what_was():
    curve = BoundedCurve()
    for x in (1, 2, 3, 4):
        curve.add(x, 1.0)
    curve.add(3, 2.0)
    assert curve.points() == [(1, 1.0), (2, 1.0), (3, 2.0)]
