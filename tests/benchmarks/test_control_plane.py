"""Smoke test of the control-plane benchmark: every simulated fault is repaired."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_every_simulated_fault_is_repaired(tmp_path: Path):
    path = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.control_plane", "--workers", "40"]
    options = ["--seconds", "4", "--step-s", "0.2", "--fault-s", "0.5", "--json", str(path)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(path.read_text())
    assert row["faults"] >= 2
    assert row["repaired"] == row["faults"], (
        "every fault is repaired, possibly together with another"
    )
    assert 1 <= row["repairs"] <= row["faults"]
    assert 0 < row["answer_ms"][0] <= row["answer_ms"][1]
    assert 0 < row["quiet_core"] < row["core"]
