"""Lightning's `DeepSpeedStrategy` over rayzero equals its DDP; and, by hand, DeepSpeed 0.19.8."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.support.scripts import run_script

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("lightning") is None, reason="lightning is missing"
    ),
]
SCRIPT = Path(__file__).with_name("lightning_fit.py")


def test_trainer_with_a_resume_equals_ddp(tmp_path: Path) -> None:
    done = run_script(str(SCRIPT), str(tmp_path), ranks=2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ddp, *stages = torch.load(tmp_path / "results.pt", weights_only=True).values()
    assert len(stages) == 3
    for stage in stages:
        assert stage["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
        for name, value in ddp["weights"].items():
            torch.testing.assert_close(stage["weights"][name], value, rtol=1e-5, atol=1e-6)
