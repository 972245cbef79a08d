"""The first script of README.md runs unchanged, and the kill of its job does what is shown."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
FILES = re.compile(r"^`([\w.]+)`[^\n]*:\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)
README = (ROOT / "README.md").read_text(encoding="utf-8")
KILL = re.compile(r"^\*\*Kill one now.*?```\n(.*?)```\n\n```\n(.*?)```", re.DOTALL | re.MULTILINE)
LOSS = 0.0959
NUMBER = re.compile(r"[\d.]+")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = dict(FILES.findall(README))
    assert files.keys() == {"first.py", "ds_config.json", "job.yaml"}
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_first_script_reproduces_documented_losses(folder: Path) -> None:
    documented = re.search(r"the same five losses, ([\d.]+) to ([\d.]+):", README)
    assert documented is not None
    done = run_script("first.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"epoch \d: loss ([\d.]+)", done.stdout)
    assert len(losses) == 5
    assert [float(losses[0]), float(losses[-1])] == pytest.approx(
        [float(loss) for loss in documented.groups()], rel=0.05
    )


@pytest.mark.slow
def test_kill_of_the_first_job_is_repaired_as_shown(folder: Path) -> None:
    """Its command as written; every line shown is in the output, but for its numbers."""
    found = KILL.search(README)
    assert found is not None
    command, shown = found.groups()
    (program, *words) = shlex.split(command)
    assert program == "rayzero"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    env.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-m", program, *words],
        cwd=folder,
        env=env,
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = [_without_numbers(line) for line in done.stdout.splitlines()]
    for line in shown.splitlines():
        beginning = _without_numbers(line.partition(" ...")[0])
        assert any(text.startswith(beginning) for text in printed), (line, done.stdout)
    assert re.search(r"2 -> 1 workers after step (39|40), no step recomputed", done.stdout)
    (last,) = re.findall(r"epoch 4: loss ([\d.]+)", done.stdout)
    assert float(last) == pytest.approx(LOSS, rel=0.05)


def _without_numbers(line: str) -> str:
    """And without the name of the machine."""
    return NUMBER.sub("#", re.sub(r"on node \S+", "on node", line))
