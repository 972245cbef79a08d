"""A random schedule of faults on NCCL's semantics; `python -m benchmarks.nccl_faults` runs many."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import nccl_faults

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("number", [1])
def test_random_schedule_loses_nothing(tmp_path: Path, number: int) -> None:
    """Kills, stops and kernel errors, slow aborts, late errors."""
    schedule = nccl_faults.draw(1, number)
    assert nccl_faults.run_local(schedule, tmp_path).wrong == []
