"""`rayzero chaos` without a job: what is printed, and with which exit code."""

from __future__ import annotations

import json

import pytest
import yaml
from typer.testing import CliRunner

from rayzero.orchestrator.cli.app import app
from rayzero.workers.chaos.spec import FAULT_KINDS, example_fault, parse_fault


def chaos(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["chaos", *arguments])
    assert done.exit_code == code, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.stdout if code == 0 else done.output


def test_the_language_is_told_with_an_example_of_every_word():
    told = chaos("--list")
    for name, kind in FAULT_KINDS.items():
        assert kind.description in told
        assert str(example_fault(name)) in told
        assert parse_fault(str(example_fault(name))) == example_fault(name)
    assert 'kill(rank=, step=, phase="forward")' in told


def test_the_language_as_json():
    words = {one["word"]: one for one in json.loads(chaos("--list", "--json"))}
    assert [*words] == [*FAULT_KINDS]
    assert words["full_disk"]["defaults"] == {"times": 1}
    assert words["kill_vault"]["required"] == ["node", "step"]


def test_a_random_schedule_is_for_a_job_file_and_the_same_again():
    words = ("--random", "5", "--seed", "3", "--ranks", "3", "--steps", "100")
    told = yaml.safe_load(chaos(*words))
    assert len(told["faults"]) == 5
    assert all(parse_fault(text).rank < 3 for text in told["faults"])
    assert json.loads(chaos(*words, "--json")) == told
    assert yaml.safe_load(chaos(*words[:3], "4", *words[4:])) != told


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((), "a fault are needed, or --list"),
        (("gpt",), "a fault are needed"),
        (("gpt", "kil(rank=1)"), "did you mean 'kill'?"),
        (("gpt", "kill(rank=1, step=0)"), "step=0"),
        (("gpt", "drop_node()"), "drop_node needs node="),
        (("--random", "3", "--steps", "1"), "faults in 1 steps"),
        (("gpt", "kill(rank=1)", "--address", "127.0.0.1:1"), "there is no Ray cluster at"),
    ],
)
def test_mistakes(words: tuple[str, ...], error: str):
    assert error in chaos(*words, code=2)
