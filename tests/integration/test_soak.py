"""The soak runs, tells what is lost, and goes on where it was broken off."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.episode import Outcome, Way, plan
from benchmarks.soak import EPISODE_FAULTS, ON_ONE_NODE, Record, line, parsed, remaining
from benchmarks.soak_job import unfired
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.chaos.spec import FaultFired, parse_fault

ROOT = Path(__file__).resolve().parents[2]


def outcome(number: int, *lost: str) -> Outcome:
    of = plan(1, number, EPISODE_FAULTS, ON_ONE_NODE, nodes=1)
    return Outcome(of, 2.0, [of.faults[0]], [Way("kill", 0.25, 1)], list(lost))


def test_an_episode_follows_from_its_seed_and_number() -> None:
    assert plan(1, 2, 5, ON_ONE_NODE, nodes=1) == plan(1, 2, 5, ON_ONE_NODE, nodes=1)
    others = [plan(1, 3, 5, ON_ONE_NODE, nodes=1), plan(2, 2, 5, ON_ONE_NODE, nodes=1)]
    assert plan(1, 2, 5, ON_ONE_NODE, nodes=1) not in others


def test_no_fault_is_meant_for_a_node_that_is_not_there() -> None:
    for number in range(20):
        faults = plan(1, number, 5, ["kill_vault", "drop_node"], nodes=2).faults
        assert len(faults) == 5
        assert {parse_fault(text).node for text in faults} <= {0, 1}


def test_the_episodes_of_a_soak_have_all_of_its_faults() -> None:
    options = parsed(["--faults", "12", "--seed", "1"])
    assert [len(of.faults) for of in remaining(options, 0)] == [5, 5, 2]
    assert [of.number for of in remaining(options, 2)] == [2]


def test_a_record_is_gone_on_with_but_not_another_soaks(tmp_path: Path) -> None:
    about = {"seed": 1, "nodes": 1, "kinds": ["kill"], "episode_faults": EPISODE_FAULTS}
    record = Record(tmp_path / "soak.json", about)
    assert record.resume() == "", "there is none yet"
    for one in (outcome(0), outcome(1, "the job failed")):
        record.add(one)
    again = Record(record.path, about)
    assert again.resume() == ""
    assert again.outcomes == record.outcomes
    assert "nothing lost" in line(again.outcomes[0])
    assert "the job failed" in line(again.outcomes[1])
    assert "is of seed 1, not 2" in Record(record.path, about | {"seed": 2}).resume()


def test_a_fault_that_did_not_happen_often_enough_is_named(tmp_path: Path) -> None:
    twice = "slow(rank=0, step=2, seconds=0.1, steps=2)"
    record = FaultRecord(tmp_path)
    record.add(FaultFired(0, 2, twice))
    assert unfired([twice], str(tmp_path)) == [twice]
    record.add(FaultFired(0, 3, twice))
    assert unfired([twice], str(tmp_path)) == []


@pytest.mark.slow
def test_nothing_is_lost_by_a_few_faults(tmp_path: Path) -> None:
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
