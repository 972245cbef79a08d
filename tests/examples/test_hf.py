"""The script for transformers' Trainer and PEFT runs on two ranks, unchanged."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.scripts import run_script

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("peft") is None,
        reason="peft is missing: pip install 'rayzero[hf]'",
    ),
]


def test_adapter_is_trained_and_saved(tmp_path: Path) -> None:
    script = ("-m", "rayzero.deepspeed", "examples/hf/train.py", str(tmp_path), "--steps", "25")
    done = run_script(*script, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    (bits,) = [line for line in done.stdout.splitlines() if line.startswith("held out: ")]
    assert float(bits.split()[2]) < 5  # 8 with random weights
    assert (tmp_path / "adapter_model.safetensors").exists()
    assert not (tmp_path / "model.safetensors").exists(), "the frozen base is not saved again"
