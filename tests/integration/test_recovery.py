"""The recovery benchmark: a killed worker costs no repeated step and no other process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.ray_train import Ended, newest
from benchmarks.recovery import summary
from benchmarks.strikes import Strike, born

ROOT = Path(__file__).resolve().parents[2]


def test_fault_cost_is_time_to_next_step_minus_step_time() -> None:
    faults = [
        Strike(0, 7, wall_s=0.75, step_s=0.5, usual_s=0.25, steps_redone=0, restarted=0),
        Strike(1, 20, wall_s=1.75, step_s=1.0, usual_s=0.25, steps_redone=2, restarted=1),
    ]
    totals = summary(faults)
    assert totals["total_s"] == {"median": 0.5, "max": 0.75}
    assert totals["strict_s"] == {"median": 1.0, "max": 1.5}
    assert (totals["steps_redone"], totals["restarted"]) == (2, 1)


def test_process_start_time_distinguishes_processes() -> None:
    assert born(os.getpid()) == born(os.getpid()) is not None
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert born(child.pid) is not None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert born(child.pid) is None, "a zombie has exited"
    child.communicate()
    assert born(child.pid) is None


def test_newest_ray_train_attempt_is_the_last_started() -> None:
    old = {5: [Ended("a", 0, 5, 1.0, 11)]}
    new = {3: [Ended("b", 0, 3, 2.0, 12)]}
    assert newest({"a": old, "b": new}) == ("b", new)


@pytest.mark.slow
def test_killed_worker_costs_no_step_and_no_other_process(tmp_path: Path) -> None:
    path = tmp_path / "recovery.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.recovery", "--kills", "1", "--json", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (strike,) = json.loads(path.read_text())["strikes"]
    assert (strike["steps_redone"], strike["restarted"]) == (0, 0)
    assert strike["rank"] in range(3)
    assert strike["wall_s"] > strike["parts"]["load"] > 0
