"""How the time of a repair or a resize is divided into phases."""

from __future__ import annotations

import pytest

from rayzero.orchestrator.control.recovery_timer import RecoveryTimer
from rayzero.orchestrator.job_events import Repaired, Resized

# Lines of time and what happens: `fault CAUSE RANK SINCE`, `resize WORLD_SIZE`, `from STEP REDONE`,
# `step SECONDS WORLD_SIZE` (a step was finished), or the name of a phase; the values that the steps
# return: world sizes, the step, steps redone, seconds.
COURSES: dict[str, tuple[str, list[Repaired | Resized | None]]] = {
    "the phases of a repair": (
        """10.5 fault lost 1 10; 10.5 fence; 11 select_step; 13 load; 17 recompute; 17 from 41 2
        17.5 step 0.25 2""",
        [
            Repaired(
                *("lost", ("rank 1",), 41, 2, 3, 2),
                {"detect": 0.5, "fence": 0.5, "select_step": 2.0, "load": 4.0, "recompute": 0.25},
            )
        ],
    ),
    "a second fault extends a repair": (
        """0 fault lost 1 0; 0 fence; 0 from 41 1; 1 fault hang 2 1; 1 fence; 1 from 41 0; 3 load
        3 step 0 1""",
        [
            Repaired(
                *("lost", ("rank 1", "rank 2"), 41, 1, 3, 1),
                {"detect": 0.0, "fence": 3.0, "load": 0.0},
            )
        ],
    ),
    "a step of the previous generation does not complete a resize, and the next does once": (
        "0 resize 2; 1 step 0 2; 2 load; 3 step 0.5 3; 4 step 0.5 3",
        [None, Resized("more", 0, 2, 3, {"drain": 2.0, "load": 0.5}), None],
    ),
    "a fault makes it a repair": (
        "3 resize 3; 5 fault lost 1 5; 6 load; 6 step 0 3",
        [Repaired("lost", ("rank 1",), 0, 0, 3, 3, {"drain": 2.0, "detect": 1.0, "load": 0.0})],
    ),
    # A replacement is ready while the survivors load.
    "a resize that is requested before the repair's step is one of its own": (
        """0 fault lost 1 0; 0 from 41 2; 1 load; 1 resize 2; 1 drain; 2 recompute; 3 step 0.5 2
        3 select_step; 3 from 42 0; 4 load; 5 step 0.5 3""",
        [
            Repaired(
                *("lost", ("rank 1",), 41, 2, 3, 2), {"detect": 1.0, "load": 1.0, "recompute": 0.5}
            ),
            Resized("more", 42, 2, 3, {"drain": 2.0, "select_step": 1.0, "load": 0.5}),
        ],
    ),
    "a resize whose drain finished no step belongs to the repair": (
        """0 fault lost 1 0; 1 load; 1 resize 2; 2 select_step; 3 load; 4 step 0.5 3
        5 step 0.5 3""",
        [
            Repaired(
                *("lost", ("rank 1",), 0, 0, 3, 3), {"detect": 1.0, "load": 1.5, "select_step": 1.0}
            ),
            None,
        ],
    ),
}


@pytest.mark.parametrize(("course", "told"), COURSES.values(), ids=COURSES)
def test_time_is_divided(course: str, told: list[Repaired | Resized | None]):
    now_s = 0.0
    timer, returned = RecoveryTimer(lambda: now_s), []
    for line in course.replace("\n", ";").split(";"):
        time_s, what, *values = line.split()
        now_s = float(time_s)
        if what == "fault":
            timer.fault_detected(values[0], [f"rank {values[1]}"], 3, float(values[2]))
        elif what == "resize":
            timer.resize_requested("more", int(values[0]))
        elif what == "from":
            timer.step_selected(int(values[0]), int(values[1]))
        elif what == "step":
            returned.append(timer.completed(float(values[0]), int(values[1])))
        else:
            timer.enter_phase(what)
    assert returned == told
