"""The script for transformers' Trainer and PEFT under `rayzero launch`: a worker is killed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("peft") is None,
        reason="peft is missing: pip install 'rayzero[hf]'",
    ),
]


def test_adapter_is_trained_and_saved_though_a_worker_is_killed(tmp_path: Path) -> None:
    settings = ("faults=['kill(rank=1, step=12)']", f"checkpoint.path={tmp_path / 'runs'}")
    settings += ("recovery.mirror_every=1",)
    command = [sys.executable, "-m", "rayzero", "launch", "--json", "--workers", "1:2"]
    command += [part for it in settings for part in ("--set", it)]
    done = subprocess.run(
        [*command, "examples/hf/train.py", str(tmp_path / "out"), "--steps", "25"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    events = [json.loads(line) for line in done.stdout.splitlines()]
    (repaired,) = [it for it in events if it["event"] == "repaired"]
    assert repaired["world_size_before"] == 2
    assert repaired["world_size"] in (1, 2)  # the replacement may have come in time
    summary = events[-1]
    assert (summary["steps"], summary["steps_redone"], summary["faults"]) == (25, 0, {"lost": 1})
    lines = [it["text"] for it in events if it["event"] == "log"]
    (bits,) = [line for line in lines if line.startswith("held out: ")]
    assert float(bits.split()[2]) < 5  # 8 with random weights
    (trained,) = [line for line in lines if "'train_loss'" in line]
    assert "'loss'" not in trained
    saved = tmp_path / "out"
    assert (saved / "adapter_model.safetensors").exists()
    assert (saved / "checkpoint-25" / "trainer_state.json").exists()
    assert not (saved / "model.safetensors").exists(), "the frozen base is not saved again"
