"""Training is equal under every launcher: none, a user's process group, torchrun.

`tests/integration/test_ray_train.py` has Ray Train.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.engine.scripts import tiny
from tests.support.ranks import run_ranks

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


def check(report: dict[str, Any], world_size: int) -> None:
    assert report.pop("world_size") == world_size
    assert sorted(report) == [f"stage {stage}" for stage in range(4)]
    for name, losses in report.items():
        assert losses == pytest.approx(tiny.train_reference(), rel=1e-9), name


def train_all_stages(rank: int, world: int) -> dict[str, Any]:
    report: dict[str, Any] = {f"stage {stage}": tiny.train(stage) for stage in range(4)}
    return report | {"world_size": dist.get_world_size() if dist.is_initialized() else 0}


@pytest.mark.parametrize("world", [0, 1, 2])
def test_existing_process_group(world: int) -> None:
    for report in run_ranks(world, train_all_stages):
        check(report, world)


@pytest.mark.slow
def test_torchrun() -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    check(run_tiny(*torchrun, "-m", "tests.engine.scripts.tiny"), 2)
