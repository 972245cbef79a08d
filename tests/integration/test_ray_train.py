"""Training under Ray Train is equal to plain torch's, by a loop of one's own and by transformers'
Trainer."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
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

    import rayzero.deepspeed

    report: dict[str, Any] = {f"stage {stage}": tiny.train(stage) for stage in (2, 3)}
    report["world_size"] = dist.get_world_size()
    if find_spec("transformers") is not None:
        rayzero.deepspeed.install()
        from tests.scripts.check_equal import trainer_case

        folder = Path(config["path"]).parent
        report["trainer"] = [trainer_case(stage, str(folder / str(stage)))[0] for stage in (2, 3)]
    if train.get_context().get_world_rank() == 0:
        Path(config["path"]).write_text(json.dumps(report))
    train.report({"loss": report["stage 2"][-1]})


@pytest.mark.slow
def test_ray_train(tmp_path: Path, head: Head) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    # `tests` is not installed: workers import it through PYTHONPATH.
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests/scripts'}"
    runtime_env = {"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}}
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
    assert result.error is None
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["world_size"] == 2
    for stage in (2, 3):
        assert report[f"stage {stage}"] == pytest.approx(tiny.train_reference(), rel=1e-9)
    if "trainer" in report:
        from safetensors.torch import load_file

        from tests.deepspeed.scripts.hf_trainer import plain_steps

        losses, weights = plain_steps()
        for stage, found in zip((2, 3), report["trainer"], strict=True):
            assert found == pytest.approx(losses, abs=2e-6)  # Trainer prints it as fp32
            for name, tensor in load_file(tmp_path / f"{stage}/final/model.safetensors").items():
                assert (weights[name] - tensor).abs().max() < 1e-9, (stage, name)
