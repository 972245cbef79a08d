"""`rayzero chaos` without a job: output and exit codes."""

from __future__ import annotations

import json

import pytest
import yaml
from typer.testing import CliRunner

from rayzero.orchestrator.cli.app import app
from rayzero.workers.chaos.spec import FAULT_KINDS, all_fault_kinds, example_fault, parse_fault


def chaos(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["chaos", *arguments])
    assert done.exit_code == code, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.stdout if code == 0 else done.output


def test_list_prints_example_of_every_fault():
    output = chaos("--list")
    for name, kind in all_fault_kinds():
        example = example_fault(name, of_role=kind.of_role)
        assert kind.description in output
        assert str(example) in output
        assert parse_fault(str(example)) == example
    assert 'kill(rank=, step=, phase="forward")' in output
    listed = json.loads(chaos("--list", "--json"))
    kinds = {kind["word"]: kind for kind in listed if kind["where"] != "role"}
    assert [*kinds] == [*FAULT_KINDS]
    assert [kind["example"] for kind in listed[len(kinds) :]] == [
        'kill(role="rollout", worker=1, step=7)',
        'stop(role="rollout", worker=1, step=7)',
    ]
    assert kinds["full_disk"]["defaults"] == {"times": 1}
    assert kinds["kill_vault"]["required"] == ["node", "step"]


def test_random_faults_are_reproducible_and_fit_job_file():
    options = ("--random", "5", "--seed", "3", "--ranks", "3", "--steps", "100")
    output = yaml.safe_load(chaos(*options))
    assert len(output["faults"]) == 5
    assert all(parse_fault(text).rank < 3 for text in output["faults"])
    assert json.loads(chaos(*options, "--json")) == output
    assert yaml.safe_load(chaos(*options[:3], "4", *options[4:])) != output


def test_random_faults_of_roles():
    options = ("--random", "40", "--ranks", "1", "--ranks", "rollout:2", "--ranks", "reward:1")
    faults = [parse_fault(text) for text in json.loads(chaos(*options, "--json"))["faults"]]
    hit = {(fault.role, fault.worker) for fault in faults if fault.kind != "hang"}
    assert hit == {("", 0), ("rollout", 0), ("rollout", 1), ("reward", 0)}
    assert not any(fault.role for fault in faults if fault.kind == "hang")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ((), "a fault are needed, or --list"),
        (("gpt", "kil(rank=1)"), "did you mean 'kill'?"),
        (("gpt", "kill(rank=1, step=0)"), "step=0"),
        (("gpt", "drop_node()"), "drop_node needs node="),
        (("--random", "3", "--ranks", "rollout"), "a number of workers, or as rollout:2"),
        (("--random", "3", "--steps", "1"), "faults in 1 steps"),
    ],
)
def test_usage_errors(options: tuple[str, ...], error: str):
    assert error in chaos(*options, code=2)
