from __future__ import annotations

import json
from pathlib import Path

from rayzero.orchestrator.notices import Repaired, Resized
from rayzero.orchestrator.repairs import Repairs, append


def test_a_repair_is_timed_part_by_part(tmp_path: Path):
    repairs = Repairs()
    repairs.noticed("lost", ["rank 1"], 3, since_s=10.0, now_s=10.5)
    for part, at_s in (("fence", 10.5), ("pick", 11.0), ("load", 13.0), ("redo", 17.0)):
        repairs.enter(part, at_s)
    repairs.picked(41, 2)
    passed = repairs.finished(0.25, 2, now_s=17.5)
    assert passed == Repaired(
        "lost",
        ("rank 1",),
        41,
        2,
        3,
        2,
        {"notice": 0.5, "fence": 0.5, "pick": 2.0, "load": 4.0, "redo": 0.25},
    )
    assert passed.total_s == 7.25
    assert (repairs.repairs, repairs.resizes, repairs.steps_redone) == (1, 0, 2)
    append(tmp_path, passed)
    append(tmp_path, passed)
    lines = (tmp_path / "repairs.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["repaired", "repaired"]


def test_a_second_fault_on_the_way_belongs_to_the_same_repair():
    repairs = Repairs()
    repairs.noticed("lost", ["rank 1"], 3, since_s=0.0, now_s=0.0)
    repairs.enter("fence", 0.0)
    repairs.picked(41, 1)
    repairs.noticed("hang", ["rank 2"], 3, since_s=1.0, now_s=1.0)
    repairs.enter("fence", 1.0)
    repairs.picked(41, 0)
    repairs.enter("load", 3.0)
    passed = repairs.finished(0.0, 1, 3.0)
    assert isinstance(passed, Repaired)
    assert (passed.cause, passed.lost) == ("lost", ("rank 1", "rank 2"))
    assert (passed.steps_redone, passed.seconds["fence"]) == (1, 3.0)


def test_a_fault_during_a_resize_makes_a_repair_of_it():
    repairs = Repairs()
    repairs.wished("from 2 to 3 workers", 2, 0.0)
    repairs.noticed("lost", ["rank 1"], 2, 1.0, 1.0)
    repairs.enter("load", 2.0)
    assert isinstance(repairs.finished(0.0, 2, 2.0), Repaired)


def test_a_step_of_the_generation_that_is_left_does_not_end_the_way():
    repairs = Repairs()
    repairs.wished("from 2 to 3 workers", 2, 0.0)
    assert repairs.finished(0.0, 2, 1.0) is None
    repairs.enter("load", 2.0)
    passed = repairs.finished(0.5, 3, 3.0)
    assert isinstance(passed, Resized)
    assert passed.seconds == {"drain": 2.0, "load": 0.5}
    assert repairs.finished(0.5, 3, 4.0) is None
    assert (repairs.repairs, repairs.resizes) == (0, 1)
