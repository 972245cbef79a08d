"""The soak benchmark: plans, resumption, reports, and a short run."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.disruptions import DISRUPTIONS, Disruption, DisruptionRunner
from benchmarks.episode import Outcome
from benchmarks.soak import (
    EPISODE_FAULTS,
    Record,
    format_outcome,
    kinds_for,
    parse_arguments,
    remaining_episodes,
)
from benchmarks.soak_control import RankState, SoakControl, parse_disruption
from benchmarks.soak_job import unfired_faults
from benchmarks.soak_plan import kind_of, plan
from benchmarks.soak_submission import Recovery
from benchmarks.soak_target import NotHeldError, Target
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


def test_outside_faults_are_planned_within_their_limits() -> None:
    kinds = ["swallow", "kill_starting", "read_only_folder", "kill"]
    plans = [plan(1, number, 5, kinds, nodes=1) for number in range(40)]
    steps: dict[str, set[int]] = {name: set() for name in kinds}
    for episode in plans:
        drawn = [kind_of(text) for text in episode.faults]
        assert drawn.count("swallow") <= 1, "the second one is the user's error"
        for text in episode.faults:
            if (parsed := parse_disruption(text)) is not None:
                steps[parsed[0]].add(parsed[1])
    last_step = plans[0].steps - 1
    assert 0 in steps["kill_starting"] & steps["read_only_folder"]
    assert last_step in steps["read_only_folder"] - steps["kill_starting"]
    assert steps["swallow"].isdisjoint({0, last_step})


def test_kinds_depend_on_nodes_and_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {"kill", "swallow"} <= set(kinds_for(nodes=1)) < set(kinds_for(nodes=2))
    impossible = replace(DISRUPTIONS["read_only_folder"], why_not=lambda: "not permitted")
    monkeypatch.setitem(DISRUPTIONS, "read_only_folder", impossible)
    options = parse_arguments([])
    assert options.refused == {"read_only_folder": "not permitted"}
    assert "read_only_folder" not in options.kinds
    with pytest.raises(SystemExit):
        parse_arguments(["--kinds", "read_only_folder"])
    assert "cannot inflict read_only_folder: not permitted" in capsys.readouterr().err


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


def test_request_is_taken_once(tmp_path: Path) -> None:
    control = make_target(tmp_path).control
    assert not control.take("joining")
    control.request("joining", "text")
    assert control.requested("joining") == "text"
    assert control.take("joining")
    assert not control.take("joining")
    assert control.taken_by("joining") == {os.getpid()}


def test_only_live_ranks_are_listed(tmp_path: Path) -> None:
    control = make_target(tmp_path).control
    ended = subprocess.Popen(["true"])
    ended.wait()
    control.report(RankState(0, os.getpid(), 4, 2))
    control.report(RankState(1, ended.pid, 4, 2))
    assert control.ranks() == [RankState(0, os.getpid(), 4, 2)]
    control.report(RankState(1, os.getpid(), 5, 2))
    assert control.ranks() == [RankState(1, os.getpid(), 5, 2)], "its newest state"


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
    kinds = ["--kinds", "kill,tear_file,long_step"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.soak",
            "--faults",
            "3",
            "--seed",
            "3",
            *kinds,
            "--state",
            str(path),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 faults in 1 episodes: nothing lost" in done.stdout
    (episode,) = json.loads(path.read_text())["episodes"]
    assert len(episode["fired"]) == 3
