"""The recovery benchmark: a killed worker costs no repeated step and no other process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import rayzero_job
from benchmarks.faults import FaultCost
from benchmarks.recovery import main, summarize

ROOT = Path(__file__).resolve().parents[2]


def test_fault_cost_is_time_to_next_step_minus_step_time() -> None:
    faults = [
        FaultCost(0, 7, wall_s=0.75, step_s=0.5, median_step_s=0.25, steps_redone=0, restarted=0),
        FaultCost(1, 20, wall_s=1.75, step_s=1.0, median_step_s=0.25, steps_redone=2, restarted=1),
    ]
    totals = summarize(faults)
    assert totals["total_s"] == {"median": 0.5, "max": 0.75}
    assert totals["strict_s"] == {"median": 1.0, "max": 1.5}
    assert (totals["steps_redone"], totals["restarted"]) == (2, 1)


@pytest.mark.slow
def test_killed_worker_costs_no_step_and_no_other_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # the job's entry point and its data
    small = {"layers": 1, "width": 64, "heads": 2, "context": 32}
    monkeypatch.setattr(rayzero_job, "MODEL", small)
    path = tmp_path / "recovery.json"
    # By default the interval follows the cost, which on a busy machine is more than a step.
    options = ["--kills", "1", "--workers", "2", "--mirror-every", "1"]
    assert main([*options, "--json", str(path)]) == 0
    (fault,) = json.loads(path.read_text())["faults"]
    assert (fault["steps_redone"], fault["restarted"]) == (0, 0)
    assert fault["rank"] in range(2)
    assert fault["wall_s"] > fault["parts"]["load"] > 0
