"""The soak benchmark: plans, resumption, reports, and a short run."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.disruptions import DISRUPTIONS, Disruption, DisruptionRunner
from benchmarks.soak import (
    kinds_for,
)
from benchmarks.soak_control import SoakControl
from benchmarks.soak_job import unfired_faults
from benchmarks.soak_plan import kind_of, plan
from benchmarks.soak_target import NotHeldError, Target
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.chaos.spec import FaultFired
from tests.support.forking import fork_server

ROOT = Path(__file__).resolve().parents[2]
SINGLE_NODE_KINDS = kinds_for(nodes=1)


def test_episode_is_determined_by_seed_and_number() -> None:
    assert plan(1, 2, 5, SINGLE_NODE_KINDS, nodes=1) == plan(1, 2, 5, SINGLE_NODE_KINDS, nodes=1)
    others = [plan(1, 3, 5, SINGLE_NODE_KINDS, nodes=1), plan(2, 2, 5, SINGLE_NODE_KINDS, nodes=1)]
    assert plan(1, 2, 5, SINGLE_NODE_KINDS, nodes=1) not in others


def make_target(tmp_path: Path) -> Target:
    control = SoakControl(tmp_path / "control")
    control.clear()
    return Target(tmp_path, control, 3, threading.Event(), submit_again=lambda: 0)


def test_disruptions_are_inflicted_in_order_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, calls = make_target(tmp_path), []

    def bear(target: Target, rng: random.Random) -> None:
        calls.append(target.text)
        if target.text.startswith("broken"):
            raise NotHeldError("a survivor was ended")
        if target.text.startswith("endless"):
            target.wait(lambda: False, 60.0, "nothing")

    for name in ("good", "broken", "endless"):
        monkeypatch.setitem(DISRUPTIONS, name, Disruption(name, "", bear))
    texts = ["broken(step=0)", "good(step=0)", "endless(step=0)", "good(step=9)"]
    runner = DisruptionRunner(target, texts, seed=1)
    runner.start()
    while len(calls) < 3:
        time.sleep(0.01)
    runner.stop()
    assert calls == texts[:3]
    assert runner.problems == ["a survivor was ended"]
    fired = ["good(step=0)"]
    assert [event.fault for event in target.control.record.read()] == fired
    assert unfired_faults(texts, str(tmp_path), target.control) == [
        text for text in texts if text not in fired
    ]


def test_fault_that_fired_too_few_times_is_reported(tmp_path: Path) -> None:
    twice = "slow(rank=0, step=2, seconds=0.1, steps=2)"
    record, control = FaultRecord(tmp_path), SoakControl(tmp_path / "control")
    record.add(FaultFired(0, 2, twice))
    assert unfired_faults([twice], str(tmp_path), control) == [twice]
    record.add(FaultFired(0, 3, twice))
    assert unfired_faults([twice], str(tmp_path), control) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        (
            "--stream --seed 27 --kinds kill,tear_file,scale_ranks",
            ["kill", "scale_ranks", "tear_file"],
        ),
        (
            "--rollouts --seed 7 --kinds kill,kill_vault,kill_role",
            ["kill", "kill_role", "kill_vault"],
        ),
    ],
)
def test_short_soak_loses_nothing(tmp_path: Path, options: str, kinds: list[str]) -> None:
    path, count = tmp_path / "soak.json", str(len(kinds))
    command = [sys.executable, "-m", "benchmarks.soak", *options.split(), "--faults", count]
    command += ["--state", str(path)]
    with fork_server():
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} faults in 1 episodes: nothing lost" in done.stdout
    (episode,) = json.loads(path.read_text())["episodes"]
    assert sorted(map(kind_of, episode["fired"])) == kinds
