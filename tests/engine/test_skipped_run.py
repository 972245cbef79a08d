"""What is told of steps whose gradient is not finite."""

from __future__ import annotations

from rayzero.engine.metrics import SkippedRun


def test_a_run_of_skipped_steps_is_told_at_growing_intervals() -> None:
    run = SkippedRun()
    told = {step: text for step in range(1, 101) if (text := run.add(step, finite=step < 3))}
    assert list(told) == [3, 4, 6, 10, 18, 34, 66]
    assert told[3] == "step 3 skipped on every rank"
    assert told[10] == "steps 3 to 10 skipped on every rank, 8 in a row"
    assert run.add(101, finite=True) == ""
    assert run.add(102, finite=False) == "step 102 skipped on every rank"
