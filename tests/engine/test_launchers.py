"""Training is equal under torchrun; `tests/integration/test_ray_train.py` has Ray Train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.scripts import tiny

ROOT = Path(__file__).parents[2]


def run_tiny(*command: str) -> dict[str, Any]:
    """Run `tiny` as `python COMMAND`, without an outer torchrun's variables; return its report."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    process = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=env | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.strip().splitlines()[-1])


@pytest.mark.slow
def test_torchrun() -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    report = run_tiny(*torchrun, "-m", "tests.engine.scripts.tiny")
    assert report.pop("world_size") == 2
    assert sorted(report) == [f"stage {stage}" for stage in range(4)]
    for name, losses in report.items():
        assert losses == pytest.approx(tiny.train_reference(), rel=1e-9), name
