"""`rayzero plan` from a terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rayzero.orchestrator.cli.app import app

MODELS = """
import torch
from torch import nn

def make():
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))

def batch(samples):
    return torch.ones(samples, 256)

def narrow(samples):
    return torch.ones(samples, 255)

def broken():
    return {}["depth"]
"""


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "models", raising=False)


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "160"})


def test_table_and_recommended_setting():
    result = plan("models:make", "--batch", "models:batch", "--world", "2", "--gpu", "10MB")
    assert result.exit_code == 0, result.output
    assert "activations" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "MiB on each rank" in result.stdout
    assert "Use stage 1: the first that fits in 9.54 MiB" in result.stdout


def test_nothing_fits_says_by_how_much():
    result = plan("models:make", "--world", "2", "--gpu", "0.001")
    assert result.exit_code == 1, result.output
    said = " ".join(result.stdout.split())
    assert "Nothing fits in 977 KiB, of which 879 KiB are for the model" in said
    assert "too much. Most of it" in said
    assert "use more ranks (--world)" in said
    result = plan("models:make", "--gpu", "100kB", "--json")
    assert result.exit_code == 1, result.output
    rows = json.loads(result.stdout)
    assert rows[0]["setting"] == "stage 0"
    parameters = 8 * (256 * 256 + 256)
    # Weights, main gradients, Adam's moments, and the gradients of a bucket as autograd makes them.
    assert rows[0]["device_total_bytes"] == parameters * (4 + 4 + 8 + 4)
    assert not any(row["fits"] or row["chosen"] for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("models:mak",), "did you mean 'make'?"),
        (("models:make", "--batch", "models:narrow"), "failed on its batch: "),
        (("models:broken",), "KeyError: 'depth' ("),
        (("models:batch",), "missing 1 required positional argument"),
        (("models:make", "--gpu", "h300"), "or b200, h200, h100,"),
        (("models:make", "--engine", "no.json"), "cannot be read"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], message: str):
    result = plan(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
