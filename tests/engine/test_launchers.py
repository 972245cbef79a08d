"""Training is equal under every launcher: none, a user's process group, torchrun, Ray Train."""

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
def test_plain_script() -> None:
    check(run_tiny("-m", "tests.engine.scripts.tiny"), 0)


@pytest.mark.slow
def test_torchrun() -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    check(run_tiny(*torchrun, "-m", "tests.engine.scripts.tiny"), 2)


def ray_train_loop(config: dict[str, Any]) -> None:
    from ray import train  # in the worker only: the other tests need no Ray

    report: dict[str, Any] = {f"stage {stage}": tiny.train(stage) for stage in (2, 3)}
    report["world_size"] = dist.get_world_size()
    if train.get_context().get_world_rank() == 0:
        Path(config["path"]).write_text(json.dumps(report))
    train.report({"loss": report["stage 2"][-1]})


@pytest.mark.slow
def test_ray_train(tmp_path: Path) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    # `tests` is not installed: workers import it through PYTHONPATH.
    runtime_env = {"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}}
    ray.init(
        address="local",
        include_dashboard=False,
        num_cpus=2,
        logging_level="error",
        log_to_driver=False,
        runtime_env=runtime_env,
    )
    try:
        result = TorchTrainer(
            ray_train_loop,
            train_loop_config={"path": str(tmp_path / "report.json")},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(
                num_workers=2, use_gpu=False, resources_per_worker={"CPU": 1}
            ),
            run_config=RunConfig(name="rayzero", storage_path=str(tmp_path)),
        ).fit()
    finally:
        ray.shutdown()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report.pop("world_size") == 2
    expected = tiny.train_reference()
    for name in ("stage 2", "stage 3"):
        assert report[name] == pytest.approx(expected, rel=1e-9)
    assert result.error is None
