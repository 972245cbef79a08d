"""The control-plane benchmark runs: simulated workers die, and each death is answered."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_every_death_is_answered(tmp_path: Path):
    path = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.control_plane", "--workers", "40"]
    more = ["--seconds", "4", "--step-s", "0.2", "--fault-s", "0.5", "--json", str(path)]
    done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(path.read_text())
    assert row["faults"] >= 2
    assert row["repaired"] == row["faults"], "a death is repaired, or belongs to another's repair"
    assert 1 <= row["repairs"] <= row["faults"]
    assert 0 < row["answer_ms"][0] <= row["answer_ms"][1]
    assert 0 < row["quiet_core"] < row["core"]
