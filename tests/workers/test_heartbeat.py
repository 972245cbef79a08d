from __future__ import annotations

from rayzero.workers.messages import Heartbeat
from rayzero.workers.training_thread import ProgressRecord


def test_it_tells_step_phase_and_how_long_it_has_been_silent():
    now_s = 100.0
    progress = ProgressRecord(clock=lambda: now_s)
    progress.begin_step(4)
    progress.enter_phase("backward")
    now_s = 102.5
    assert progress.heartbeat(rank=1) == Heartbeat(1, 4, "backward", 2.5)
    progress.begin_step(5)
    assert progress.heartbeat(rank=1) == Heartbeat(1, 5, "backward", 0.0)
