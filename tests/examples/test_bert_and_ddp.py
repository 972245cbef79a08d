"""Script examples: BERT with the DeepSpeed and the rayzero API, DDP compared with rayzero."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

from examples.bert.data import KINDS, LENGTH, VOCAB, encode, load, snippets
from examples.ddp.train import LOOPS
from tests.support.ranks import run_ranks
from tests.support.scripts import run_script

SHORT = ("--per_kind", "600", "--epochs", "3")
CONFIG = ("--deepspeed_config", "examples/bert/ds_config.json")
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed: pip install 'rayzero[examples]'",
)


def run(*command: str, ranks: int = 0) -> str:
    """Output of `python COMMAND` in a forked process, or in one per rank as under torchrun."""
    done = run_script(*command, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_snippets_are_classified() -> None:
    source = (
        '"""A doc string here."""\nx = call(1)  # a comment about it\ndef f():\n    return x + 1\n'
    )
    assert sorted(snippets(source)) == [
        ("code", "return x + 1"),
        ("code", "x = call(1)"),
        ("comment", "a comment about it"),
        ("docstring", "A doc string here."),
    ]
    assert list(snippets("x = (")) == []
    assert encode("a b a")[1] == encode("a b a")[3]
    assert len(encode("word " * 100)) == LENGTH


def test_data_is_balanced_and_reproducible() -> None:
    train, test = load(40)
    ids, mask, labels = train.tensors
    assert ids.shape == (120, LENGTH)
    assert (len(test), int(ids.max()) < VOCAB) == (30, True)
    assert labels.bincount().tolist() == [40] * len(KINDS)
    assert torch.equal(mask == 0, ids == 0)
    assert torch.equal(load(40)[0].tensors[0], ids)


@needs_transformers
@pytest.mark.slow
def test_deepspeed_script_learns() -> None:
    script = "examples/bert/train_deepspeed.py"
    output = run("-m", "rayzero.deepspeed", script, *CONFIG, *SHORT, ranks=2)
    accuracy = float(output.strip().splitlines()[-1].removeprefix("accuracy "))
    assert accuracy > 0.7  # chance level is 0.33


@needs_transformers
@pytest.mark.slow
def test_rayzero_script_learns() -> None:
    output = run("-m", "examples.bert.train_rayzero", *SHORT)
    accuracy = float(output.strip().splitlines()[-1].removeprefix("accuracy "))
    assert accuracy > 0.7


def loss_curves(rank: int, world: int, steps: int) -> dict[str, list[float]]:
    return {name: loop(steps, rank, world) for name, loop in LOOPS.items()}


def test_ddp_and_rayzero_have_the_same_losses() -> None:
    losses = run_ranks(2, loss_curves, 20)[0]
    assert losses["rayzero"] == pytest.approx(losses["ddp"], rel=1e-5)
    assert losses["ddp"][-1] < losses["ddp"][0] - 1


@pytest.mark.slow
def test_ddp_example_runs_under_torchrun() -> None:
    output = run("-m", "examples.ddp.train", "--with", "rayzero", "--steps", "5", ranks=2)
    assert json.loads(output) == pytest.approx(run_ranks(2, loss_curves, 5)[0]["ddp"], rel=1e-5)
