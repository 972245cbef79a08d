from __future__ import annotations

from rayzero.orchestrator.control.generation import RecoveryTimer
from rayzero.orchestrator.job_events import Repaired, Resized


def test_a_repair_is_timed_part_by_part():
    repairs = RecoveryTimer()
    repairs.fault_detected("lost", ["rank 1"], 3, since_s=10.0, now_s=10.5)
    for part, at_s in (("fence", 10.5), ("select_step", 11.0), ("load", 13.0), ("recompute", 17.0)):
        repairs.enter_phase(part, at_s)
    repairs.step_selected(41, 2)
    passed = repairs.completed(0.25, 2, now_s=17.5)
    assert passed == Repaired(
        "lost",
        ("rank 1",),
        41,
        2,
        3,
        2,
        {"detect": 0.5, "fence": 0.5, "select_step": 2.0, "load": 4.0, "recompute": 0.25},
    )
    assert passed.total_s == 7.25
    assert (repairs.repairs, repairs.resizes, repairs.steps_redone) == (1, 0, 2)


def test_a_second_fault_on_the_way_belongs_to_the_same_repair():
    repairs = RecoveryTimer()
    repairs.fault_detected("lost", ["rank 1"], 3, since_s=0.0, now_s=0.0)
    repairs.enter_phase("fence", 0.0)
    repairs.step_selected(41, 1)
    repairs.fault_detected("hang", ["rank 2"], 3, since_s=1.0, now_s=1.0)
    repairs.enter_phase("fence", 1.0)
    repairs.step_selected(41, 0)
    repairs.enter_phase("load", 3.0)
    passed = repairs.completed(0.0, 1, 3.0)
    assert isinstance(passed, Repaired)
    assert (passed.cause, passed.lost) == ("lost", ("rank 1", "rank 2"))
    assert (passed.steps_redone, passed.seconds["fence"]) == (1, 3.0)


def test_a_fault_during_a_resize_makes_a_repair_of_it():
    repairs = RecoveryTimer()
    repairs.resize_requested("from 2 to 3 workers", 2, 0.0)
    repairs.fault_detected("lost", ["rank 1"], 2, 1.0, 1.0)
    repairs.enter_phase("load", 2.0)
    assert isinstance(repairs.completed(0.0, 2, 2.0), Repaired)


def test_a_step_of_the_generation_that_is_left_does_not_end_the_way():
    repairs = RecoveryTimer()
    repairs.resize_requested("from 2 to 3 workers", 2, 0.0)
    assert repairs.completed(0.0, 2, 1.0) is None
    repairs.enter_phase("load", 2.0)
    passed = repairs.completed(0.5, 3, 3.0)
    assert isinstance(passed, Resized)
    assert passed.seconds == {"drain": 2.0, "load": 0.5}
    assert repairs.completed(0.5, 3, 4.0) is None
    assert (repairs.repairs, repairs.resizes) == (0, 1)
