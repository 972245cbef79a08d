"""The first script of README.md runs unchanged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
FILES = re.compile(r"^`([\w.]+)`[^\n]*:\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_first_script_reproduces_documented_losses(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files = dict(FILES.findall(text))
    assert files.keys() == {"first.py", "ds_config.json", "job.yaml"}
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    documented = re.search(r"the same five losses, ([\d.]+) to ([\d.]+):", text)
    assert documented is not None
    done = run_script("first.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"epoch \d: loss ([\d.]+)", done.stdout)
    assert len(losses) == 5
    assert [float(losses[0]), float(losses[-1])] == pytest.approx(
        [float(loss) for loss in documented.groups()], rel=0.05
    )
