"""The end-to-end benchmark runs and its results meet the requirements."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.scraper import program
from tests.house.source import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)
def test_whole_job_lifecycle(tmp_path: Path):
    path = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks.end_to_end", "--more", "5", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    found, seconds = report["found"], report["seconds"]
    assert min(seconds.values()) >= 0
    assert (found["left in the cluster"], found["left on the machine"]) == ([], [])
    assert found["largest difference of a step's loss"] < 1e-3
    assert found["its last checkpoint"] == found["stopped at step"]
    assert found["steps done again after the worker's death"] <= 1
    assert 0 < found["steps done again after the head's death"] < 40, "since the last checkpoint"
    assert found["what Ray says of a stopped job"] == "STOPPED"
    assert found["what Ray says of a finished job"] == "SUCCEEDED"
    assert found["generation after the driver's death"] == 1, "the job is not affected"
    if program() is None:
        pytest.skip(
            "Prometheus is neither on PATH nor in RAYZERO_PROMETHEUS; all other checks passed"
        )
    assert found["alerts before the fault"] == []
    assert found["alerts after the fault"] == ["RayzeroFaultBudgetNearlySpent"]
