"""How the time of a repair or a resize is divided into phases."""

from __future__ import annotations

from rayzero.orchestrator.control.recovery_timer import RecoveryTimer
from rayzero.orchestrator.job_events import Repaired, Resized


class TimerHarness:
    """A timer with a clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timer = RecoveryTimer(lambda: self.now_s)

    def enter_phase(self, phase: str, now_s: float) -> None:
        self.now_s = now_s
        self.timer.enter_phase(phase)

    def fault_detected(self, cause: str, lost: str, since_s: float, now_s: float) -> None:
        self.now_s = now_s
        self.timer.fault_detected(cause, [lost], 3, since_s)

    def completed(self, step_s: float, world_size: int, now_s: float) -> Repaired | Resized | None:
        self.now_s = now_s
        return self.timer.completed(step_s, world_size)


def test_repair_phases_are_timed():
    harness = TimerHarness()
    harness.fault_detected("lost", "rank 1", since_s=10.0, now_s=10.5)
    phases = {"fence": 10.5, "select_step": 11.0, "load": 13.0, "recompute": 17.0}
    for phase, now_s in phases.items():
        harness.enter_phase(phase, now_s)
    harness.timer.step_selected(41, 2)
    repaired = harness.completed(0.25, 2, now_s=17.5)
    seconds = {"detect": 0.5, "fence": 0.5, "select_step": 2.0, "load": 4.0, "recompute": 0.25}
    assert repaired == Repaired("lost", ("rank 1",), 41, 2, 3, 2, seconds)
    assert repaired.total_s == 7.25


def test_second_fault_extends_repair():
    harness = TimerHarness()
    harness.fault_detected("lost", "rank 1", since_s=0.0, now_s=0.0)
    harness.enter_phase("fence", 0.0)
    harness.timer.step_selected(41, 1)
    harness.fault_detected("hang", "rank 2", since_s=1.0, now_s=1.0)
    harness.enter_phase("fence", 1.0)
    harness.timer.step_selected(41, 0)
    harness.enter_phase("load", 3.0)
    repaired = harness.completed(0.0, 1, 3.0)
    assert (repaired.cause, repaired.lost) == ("lost", ("rank 1", "rank 2"))
    assert (repaired.steps_redone, repaired.seconds["fence"]) == (1, 3.0)


def test_step_of_previous_generation_does_not_complete_resize():
    harness = TimerHarness()
    harness.timer.resize_requested("from 2 to 3 workers", 2)
    assert harness.completed(0.0, 2, 1.0) is None
    harness.enter_phase("load", 2.0)
    resized = harness.completed(0.5, 3, 3.0)
    assert isinstance(resized, Resized)
    assert resized.seconds == {"drain": 2.0, "load": 0.5}
    assert harness.completed(0.5, 3, 4.0) is None
    harness.timer.resize_requested("from 3 to 4 workers", 3)
    harness.fault_detected("lost", "rank 1", 5.0, 5.0)
    harness.enter_phase("load", 6.0)
    assert isinstance(harness.completed(0.0, 3, 6.0), Repaired), "a fault makes it a repair"


def test_resize_requested_before_the_repairs_step_is_one_of_its_own():
    """A replacement is ready while the survivors load: the repair was told after the resize, as one
    of 3 -> 3 workers."""
    harness = TimerHarness()
    harness.fault_detected("lost", "rank 1", since_s=0.0, now_s=0.0)
    harness.timer.step_selected(41, 2)
    harness.enter_phase("load", 1.0)
    harness.timer.resize_requested("1 joined", 2)
    harness.enter_phase("drain", 1.0)
    harness.enter_phase("recompute", 2.0)
    repaired = harness.completed(0.5, 2, now_s=3.0)
    assert (repaired.world_size_before, repaired.world_size) == (3, 2)
    harness.enter_phase("select_step", 3.0)
    harness.timer.step_selected(42, 0)
    harness.enter_phase("load", 4.0)
    resized = harness.completed(0.5, 3, now_s=5.0)
    assert (resized.world_size_before, resized.world_size, resized.step) == (2, 3, 42)
    assert resized.seconds == {"drain": 2.0, "select_step": 1.0, "load": 0.5}


def test_resize_whose_drain_finished_no_step_belongs_to_the_repair():
    harness = TimerHarness()
    harness.fault_detected("lost", "rank 1", since_s=0.0, now_s=0.0)
    harness.enter_phase("load", 1.0)
    harness.timer.resize_requested("1 joined", 2)
    harness.enter_phase("select_step", 2.0)
    harness.enter_phase("load", 3.0)
    assert isinstance(harness.completed(0.5, 3, now_s=4.0), Repaired)
    assert harness.completed(0.5, 3, now_s=5.0) is None
