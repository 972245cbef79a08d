"""`rayzero plan` from a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def plan(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "models.py").write_text(MODELS)
    return subprocess.run(
        [sys.executable, "-m", "rayzero", "plan", *arguments],
        cwd=folder,
        env=os.environ | {"COLUMNS": "160", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_table_and_recommended_setting(tmp_path: Path):
    result = plan(
        tmp_path, "models:make", "--batch", "models:batch", "--world", "2", "--gpu", "10MB"
    )
    assert result.returncode == 0, result.stderr
    assert "activations" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "MiB on each rank" in result.stdout
    assert "Use stage 1: the first that fits in 9.54 MiB" in result.stdout


@pytest.mark.slow
def test_nothing_fits_says_by_how_much(tmp_path: Path):
    result = plan(tmp_path, "models:make", "--world", "2", "--gpu", "0.001")
    assert result.returncode == 1, result.stderr
    said = " ".join(result.stdout.split())
    assert "Nothing fits in 977 KiB, of which 879 KiB are for the model" in said
    assert "too much. Most of it" in said
    assert "use more ranks (--world)" in said


@pytest.mark.slow
def test_json_when_nothing_fits(tmp_path: Path):
    result = plan(tmp_path, "models:make", "--gpu", "100kB", "--json")
    assert result.returncode == 1, result.stderr
    rows = json.loads(result.stdout)
    first = rows[0]
    assert first["setting"] == "stage 0"
    parameters = 8 * (256 * 256 + 256)
    # Weights, main gradients, Adam's moments, and the gradients of a bucket as autograd makes them.
    assert first["device_total_bytes"] == parameters * (4 + 4 + 8 + 4)
    assert not any(row["fits"] or row["chosen"] for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("models",), "'models' is not the name of a function"),
        (("models:mak",), "did you mean 'make'?"),
        (("models:make", "--batch", "models:narrow"), "failed on its batch: "),
        (("models:broken",), "KeyError: 'depth' ("),
        (("models:batch",), "missing 1 required positional argument"),
        (("models:make", "--gpu", "8x"), "--gpu '8x' is neither a size nor a GPU that is known"),
        (("models:make", "--gpu", "h300"), "or b200, h200, h100,"),
        (("models:make", "--engine", "no.json"), "cannot be read"),
    ],
)
@pytest.mark.slow
def test_usage_errors(tmp_path: Path, arguments: tuple[str, ...], message: str):
    result = plan(tmp_path, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
