"""Training with or without offload, and separate host memory on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rayzero
from rayzero.engine.device import MetaDevice
from rayzero.engine.offload import plan
from rayzero.engine.offload.transfer import HostTransfer, StreamTransfer
from tests.engine import zoo

SAMPLES, CLIP = 12, 0.5
SCALE_POWER = 8  # the fp16 loss scale is constant: references have no scaler
TrainResult = tuple[list[float], dict[str, Tensor]]
CPU = {"offload_optimizer": {"device": "cpu"}}
PARAM = {"offload_param": {"device": "cpu"}}


@contextmanager
def separate_host_memory(*, streams: bool = False) -> Iterator[None]:
    """Copies between device and host memory on a CPU, as on a GPU; `streams`: with the buffers that
    a GPU's copies need."""
    original = plan.make_transfer

    def make_transfer(device: torch.device) -> HostTransfer:
        return StreamTransfer(MetaDevice(device)) if streams else HostTransfer(separate_memory=True)

    plan.make_transfer = make_transfer
    try:
        yield
    finally:
        plan.make_transfer = original


def offload_configs(folder: Path, stage: int = 3) -> dict[str, dict[str, Any]]:
    """What a stage can offload. In files in chunks of 64 elements, so that units are divided."""
    place = {"device": "nvme", "nvme_path": str(folder)}
    nvme = {"offload_optimizer": place | {"buffer_count": 3}, "sub_group_size": 64}
    half = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    configs: dict[str, dict[str, Any]] = {"": {}, "cpu": CPU, "half": half, "nvme": nvme}
    if stage == 3:
        files = {"offload_param": place}
        configs |= {"param": PARAM, "both": CPU | PARAM, "nvme and param": nvme | PARAM}
        configs |= {"param files": files, "both in files": nvme | files}
    return configs


def config(
    stage: int, precision: str = "fp32", micro_steps: int = 1, **zero: Any
) -> dict[str, Any]:
    fp16 = {"initial_scale_power": SCALE_POWER, "loss_scale_window": 1000, "hysteresis": 1}
    return {
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16", **fp16},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 150, **zero},
    }


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2, fused=True)


def make_engine(
    settings: dict[str, Any],
    optimizer: Any = adamw,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> rayzero.Engine:
    model = zoo.make_model(dtype, seed)
    engine, *_ = rayzero.initialize(
        model=model,
        model_parameters=zoo.two_groups(model),
        optimizer=optimizer,
        config=settings,
    )
    return engine


def run_steps(engine: rayzero.Engine, steps: Sequence[int]) -> list[float]:
    """Trains on the batches with these numbers; the loss of each step."""
    data = [batch.to(engine.device) for batch in zoo.batches(max(steps) + 1, SAMPLES)]
    chosen = [data[step] for step in steps]
    return zoo.train(engine, chosen, engine.settings.batches.micro_steps)


def train(settings: dict[str, Any], steps: int = 3, *options: Any) -> TrainResult:
    """`options`: those of `make_engine`."""
    engine = make_engine(settings, *options)
    losses = run_steps(engine, range(steps))
    result = losses, engine.state_dict()
    engine.close()
    return result
