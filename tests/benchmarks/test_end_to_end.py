"""The end-to-end benchmark runs and its results meet the requirements."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.scraper import find_prometheus
from tests.house.source import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)
def test_whole_job_lifecycle(tmp_path: Path):
    path = tmp_path / "results.json"
    # Paced, to leave CPU time to other tests.
    settings = ("--more", "5", "--pause-s", "0.05", "--forks")
    command = [sys.executable, "-m", "benchmarks.end_to_end", *settings, "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    results, seconds = report["results"], report["seconds"]
    assert min(seconds.values()) >= 0
    assert (results["cluster leaks"], results["machine leaks"]) == ([], [])
    assert results["max loss difference"] < 1e-3
    assert results["last checkpoint"] == results["stopped at step"]
    assert results["steps repeated after worker loss"] < 10, "since the last copy in memory"
    assert 0 < results["steps repeated after head loss"] < 60, "since the last checkpoint"
    assert results["Ray status of stopped job"] == "STOPPED"
    assert results["Ray status of finished job"] == "SUCCEEDED"
    assert results["generation after driver loss"] == 1, "the job is not affected"
    if find_prometheus() is None:
        pytest.skip(
            "Prometheus is neither on PATH nor in RAYZERO_PROMETHEUS; all other checks passed"
        )
    assert results["alerts before the fault"] == []
    assert results["alerts after the fault"] == ["RayzeroFaultBudgetNearlySpent"]
