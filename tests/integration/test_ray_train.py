"""Training under Ray Train is equal to plain torch's, by a loop of one's own and by transformers'
Trainer; a Ray dataset is read as a stream."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import ray
import torch.distributed as dist
from torch import nn

import rayzero.data
from rayzero.data import BlockSource
from rayzero.engine.errors import DataError
from tests.engine.scripts import tiny
from tests.integration.conftest import Head

ROOT = Path(__file__).parents[2]
ROWS = 24


def ray_train_loop(config: dict[str, Any]) -> None:
    from ray import train

    import rayzero.deepspeed

    report: dict[str, Any] = {f"stage {stage}": tiny.train(stage) for stage in (2, 3)}
    report["world_size"] = dist.get_world_size()
    report["rows"] = read_stream(config["source"])
    with pytest.raises(DataError, match="not a map-style dataset") as refused:
        rayzero.initialize(
            model=nn.Linear(1, 1),
            training_data=train.get_dataset_shard("train"),
            config={"train_batch_size": 8, "optimizer": {"type": "SGD"}},
        )
    assert "rayzero.data.from_ray(dataset)" in refused.value.fix
    if find_spec("transformers") is not None:
        rayzero.deepspeed.install()
        sys.path.insert(0, str(ROOT / "tests/scripts"))
        from tests.scripts.check_equal import trainer_case

        folder = Path(config["path"]).parent
        report["trainer"] = [trainer_case(stage, str(folder / str(stage)))[0] for stage in (2, 3)]
    if train.get_context().get_world_rank() == 0:
        Path(config["path"]).write_text(json.dumps(report))
    train.report({"loss": report["stage 2"][-1]})


def read_stream(source: BlockSource) -> list[list[int]]:
    """The rows of each step of an epoch, of all ranks."""
    engine, _, loader, _ = rayzero.initialize(
        model=nn.Linear(1, 1),
        training_data=rayzero.data.stream(source, shuffle_window=2),
        config={"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    )
    steps = []
    for batch in loader:
        engine.backward(engine(batch["id"].float()[:, None]).mean())
        engine.step()
        parts: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(parts, batch["id"].tolist())
        steps.append([row for part in parts for row in part])
    return steps


@pytest.mark.slow
def test_ray_train(tmp_path: Path, head: Head) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    # Without a PYTHONPATH in a runtime environment, which would keep workers from being forked.
    ray.init(address=head.address, logging_level="error", log_to_driver=False)
    try:
        dataset = ray.data.range(ROWS, override_num_blocks=4)
        source = rayzero.data.from_ray(dataset)
        result = TorchTrainer(
            ray_train_loop,
            train_loop_config={"path": str(tmp_path / "report.json"), "source": source},
            datasets={"train": dataset},
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
    order = rayzero.data.stream(source, shuffle_window=2).order(0, 8)
    assert report["rows"] == [order.indices(start, 8).tolist() for start in range(0, ROWS, 8)]
    assert sorted(row for step in report["rows"] for row in step) == [*range(ROWS)]
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
