from __future__ import annotations

from rayzero.workers.heartbeat import Progress
from rayzero.workers.messages import Heartbeat


def test_it_tells_step_phase_and_how_long_it_has_been_silent():
    now_s = 100.0
    progress = Progress(clock=lambda: now_s)
    progress.working_on(4)
    progress.entered("backward")
    now_s = 102.5
    assert progress.heartbeat(rank=1) == Heartbeat(1, 4, "backward", 2.5)
    progress.working_on(5)
    assert progress.heartbeat(rank=1) == Heartbeat(1, 5, "backward", 0.0)
