"""Prometheus' own programs, where a machine has them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.house.source import ROOT

ALERTS = ROOT / "helm/rayzero/files/alerts.yaml"


def program(name: str) -> str:
    """Where `prometheus` or `promtool` is; skips the test where it is not."""
    variable = f"RAYZERO_{name.upper()}"
    found = os.environ.get(variable) or shutil.which(name)
    if not found:
        pytest.skip(f"{name} is neither on PATH nor named by {variable}")
    return found


def promtool(*arguments: str, cwd: Path) -> str:
    """What it says; fails the test if it is not content."""
    command = [program("promtool"), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


def rules(expressions: dict[str, str]) -> str:
    """Expressions as the text of a file of recording rules, so that promtool parses each."""
    rows = [
        {"record": f"check:{number}", "expr": expr, "labels": {"of": name}}
        for number, (name, expr) in enumerate(expressions.items())
    ]
    return yaml.safe_dump({"groups": [{"name": "check", "rules": rows}]}, sort_keys=False)


def filled(expr: str, job: str = "gpt") -> str:
    """A dashboard's expression with its variables replaced."""
    for variable, value in {
        "$__rate_interval": "1m",
        "$__interval": "1m",
        "$job": job,
        "$rank": ".*",
    }.items():
        expr = expr.replace(variable, value)
    return expr
