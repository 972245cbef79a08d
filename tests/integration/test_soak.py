"""The soak benchmark: plans, resumption, reports, and a short run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.episode import Outcome
from benchmarks.soak import (
    EPISODE_FAULTS,
    Record,
    format_outcome,
    kinds_for,
    parse_arguments,
    remaining_episodes,
)
from benchmarks.soak_control import SoakControl
from benchmarks.soak_job import unfired_faults
from benchmarks.soak_plan import plan
from benchmarks.soak_submission import Recovery
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.chaos.spec import FaultFired, parse_fault

ROOT = Path(__file__).resolve().parents[2]
SINGLE_NODE_KINDS = kinds_for(nodes=1)


def outcome(number: int, *lost: str) -> Outcome:
    episode = plan(1, number, EPISODE_FAULTS, SINGLE_NODE_KINDS, nodes=1)
    return Outcome(episode, 2.0, [episode.faults[0]], [Recovery("kill", 0.25, 1)], list(lost))


def test_episode_is_determined_by_seed_and_number() -> None:
    assert plan(1, 2, 5, SINGLE_NODE_KINDS, nodes=1) == plan(1, 2, 5, SINGLE_NODE_KINDS, nodes=1)
    others = [plan(1, 3, 5, SINGLE_NODE_KINDS, nodes=1), plan(2, 2, 5, SINGLE_NODE_KINDS, nodes=1)]
    assert plan(1, 2, 5, SINGLE_NODE_KINDS, nodes=1) not in others


def test_faults_target_existing_nodes() -> None:
    for number in range(20):
        faults = plan(1, number, 5, ["kill_vault", "drop_node"], nodes=2).faults
        assert len(faults) == 5
        assert {parse_fault(text).node for text in faults} <= {0, 1}


def test_episodes_contain_all_requested_faults() -> None:
    options = parse_arguments(["--faults", "12", "--seed", "1"])
    assert [len(episode.faults) for episode in remaining_episodes(options, 0)] == [5, 5, 2]
    assert [episode.number for episode in remaining_episodes(options, 2)] == [2]


def test_resume_requires_matching_settings(tmp_path: Path) -> None:
    settings = {"seed": 1, "nodes": 1, "kinds": ["kill"], "episode_faults": EPISODE_FAULTS}
    record = Record(tmp_path / "soak.json", settings)
    assert record.resume() == "", "no record exists yet"
    for result in (outcome(0), outcome(1, "the job failed")):
        record.add(result)
    resumed = Record(record.path, settings)
    assert resumed.resume() == ""
    assert resumed.outcomes == record.outcomes
    assert "nothing lost" in format_outcome(resumed.outcomes[0])
    assert "the job failed" in format_outcome(resumed.outcomes[1])
    assert "is of seed 1, not 2" in Record(record.path, settings | {"seed": 2}).resume()


def test_fault_that_fired_too_few_times_is_reported(tmp_path: Path) -> None:
    twice = "slow(rank=0, step=2, seconds=0.1, steps=2)"
    record, control = FaultRecord(tmp_path), SoakControl(tmp_path / "control")
    record.add(FaultFired(0, 2, twice))
    assert unfired_faults([twice], str(tmp_path), control) == [twice]
    record.add(FaultFired(0, 3, twice))
    assert unfired_faults([twice], str(tmp_path), control) == []


@pytest.mark.slow
def test_short_soak_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    kinds = ["--kinds", "kill,kill_vault,tear_file"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", "--faults", "3", *kinds, "--state", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 faults in 1 episodes: nothing lost" in done.stdout
    (episode,) = json.loads(path.read_text())["episodes"]
    assert len(episode["fired"]) == 3
