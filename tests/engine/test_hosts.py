"""One engine, whoever started its processes: nobody, the user, torchrun, Ray Train."""

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


def started(*command: str) -> dict[str, Any]:
    """What `tiny` told, started by `python COMMAND` without the variables of an outer torchrun."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=kept | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def check(told: dict[str, Any], world_size: int) -> None:
    assert told.pop("world_size") == world_size
    assert sorted(told) == [f"stage {stage}" for stage in range(4)]
    for name, losses in told.items():
        assert losses == pytest.approx(tiny.plain(), rel=1e-9), name


def with_group(rank: int, world: int) -> dict[str, Any]:
    told: dict[str, Any] = {f"stage {stage}": tiny.train(stage) for stage in range(4)}
    return told | {"world_size": dist.get_world_size() if dist.is_initialized() else 0}


@pytest.mark.parametrize("world", [0, 1, 2])
def test_alone_and_in_a_group_that_the_user_made(world: int) -> None:
    for told in run_ranks(world, with_group):
        check(told, world)


@pytest.mark.slow
def test_alone_as_a_program() -> None:
    check(started("-m", "tests.engine.scripts.tiny"), 0)


@pytest.mark.slow
def test_torchrun() -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    check(started(*torchrun, "-m", "tests.engine.scripts.tiny"), 2)


def in_ray_train(config: dict[str, Any]) -> None:
    from ray import train  # in the worker; the rest of this file needs no Ray

    told: dict[str, Any] = {f"stage {stage}": tiny.train(stage) for stage in (2, 3)}
    told["world_size"] = dist.get_world_size()
    if train.get_context().get_world_rank() == 0:
        Path(config["path"]).write_text(json.dumps(told))
    train.report({"loss": told["stage 2"][-1]})


@pytest.mark.slow
def test_ray_train(tmp_path: Path) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    # `tests` is not installed: the workers find it through the path.
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
            in_ray_train,
            train_loop_config={"path": str(tmp_path / "told.json")},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(
                num_workers=2, use_gpu=False, resources_per_worker={"CPU": 1}
            ),
            run_config=RunConfig(name="rayzero", storage_path=str(tmp_path)),
        ).fit()
    finally:
        ray.shutdown()
    told = json.loads((tmp_path / "told.json").read_text())
    assert told.pop("world_size") == 2
    right = tiny.plain()
    for name in ("stage 2", "stage 3"):
        assert told[name] == pytest.approx(right, rel=1e-9)
    assert result.error is None
