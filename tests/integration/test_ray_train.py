"""Training under Ray Train is equal to plain torch's, by a loop of one's own and by transformers'
Trainer."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engine.scripts import tiny
from tests.integration.conftest import Head

ROOT = Path(__file__).parents[2]


STEPS, SAMPLES, LR = 4, 8, 0.05


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        # Trainer casts inputs to the config's dtype, which cannot be float64.
        return {"loss": (self.layers(x.double()) - y.double()).pow(2).mean()}


def samples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(SAMPLES, 4, generator=generator)
    return [{"x": row, "y": row.sum().reshape(1)} for row in x]


def train_by_trainer(folder: Path, stage: int) -> list[list[float]]:
    """The weights after steps of transformers' Trainer, each over all samples."""
    import rayzero.deepspeed

    rayzero.deepspeed.install()
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(folder),
        deepspeed={
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {
                "stage": stage,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "optimizer": {"type": "SGD", "params": {"lr": "auto", "momentum": 0.9}},
        },
        per_device_train_batch_size=SAMPLES // dist.get_world_size(),
        max_steps=STEPS,
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=0.5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(Regression(), arguments, train_dataset=samples())
    trainer.train()
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return [it.flatten().tolist() for it in weights.values()] if weights else []


def train_by_torch() -> list[list[float]]:
    model, given = Regression(), samples()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(*(torch.stack([it[name] for it in given]) for name in ("x", "y")))["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [it.flatten().tolist() for it in model.state_dict().values()]


def ray_train_loop(config: dict[str, Any]) -> None:
    from ray import train

    report: dict[str, Any] = {f"stage {stage}": tiny.train(stage) for stage in (2, 3)}
    report["world_size"] = dist.get_world_size()
    if find_spec("transformers") is not None:
        folder = Path(config["path"]).parent
        report["trainer"] = [train_by_trainer(folder, stage) for stage in (2, 3)]
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
    weights = train_by_torch()
    for found in report.get("trainer", ()):
        assert found == [pytest.approx(it, abs=1e-9) for it in weights]
    assert result.error is None
