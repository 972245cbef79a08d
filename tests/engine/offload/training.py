"""Training with or without offload, and separate host memory on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import rayzero
from rayzero.engine.device import MetaDevice
from rayzero.engine.offload import plan
from rayzero.engine.offload.transfer import HostTransfer, StreamTransfer
from tests.engine import zoo

SAMPLES, CLIP = 12, 0.5
TrainResult = tuple[list[float], dict[str, Tensor]]


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


def config(
    stage: int, precision: str = "fp32", micro_steps: int = 1, **offload: Any
) -> dict[str, Any]:
    return {
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 150, **offload},
    }


def make_engine(settings: dict[str, Any], seed: int = 0) -> rayzero.Engine:
    model = zoo.make_model(seed=seed)
    engine, *_ = rayzero.initialize(
        model=model,
        model_parameters=zoo.two_groups(model),
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
        config=settings,
    )
    return engine


def run_steps(engine: rayzero.Engine, steps: Sequence[int]) -> list[float]:
    data = list(zoo.batches(max(steps) + 1, SAMPLES))
    losses = []
    for step in steps:
        part = data[step].chunk(engine.world_size)[engine.rank]
        for micro in part.chunk(engine.settings.batches.micro_steps):
            loss = engine(micro[:, :-1], targets=micro[:, 1:])["loss"]
            engine.backward(loss)
            engine.step()
        losses.append(engine.metrics.loss)
    return losses


def train(settings: dict[str, Any], steps: int = 3) -> TrainResult:
    engine = make_engine(settings)
    losses = run_steps(engine, range(steps))
    result = losses, engine.state_dict()
    engine.close()
    return result
