"""Training under Ray Train is equal to plain torch's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ray
import torch.distributed as dist

from tests.engine.scripts import tiny
from tests.integration.conftest import Head

ROOT = Path(__file__).parents[2]


def ray_train_loop(config: dict[str, Any]) -> None:
    from ray import train

    report: dict[str, Any] = {f"stage {stage}": tiny.train(stage) for stage in (2, 3)}
    report["world_size"] = dist.get_world_size()
    if train.get_context().get_world_rank() == 0:
        Path(config["path"]).write_text(json.dumps(report))
    train.report({"loss": report["stage 2"][-1]})


@pytest.mark.slow
def test_ray_train(tmp_path: Path, head: Head) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    # `tests` is not installed: workers import it through PYTHONPATH.
    runtime_env = {"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}}
    ray.init(
        address=head.address, logging_level="error", log_to_driver=False, runtime_env=runtime_env
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
