"""One rank that trains as several do: stages sharded, collectives run. And the model it trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rayzero
from benchmarks.gpu.report import Settings
from benchmarks.systems import CLIP_NORM, OPTIMIZER
from examples.gpt.model import GPT, GPTConfig
from tests.engine.gpu.training import single_rank_group

MODEL = GPTConfig(vocab=50304, context=1024, layers=12, width=1024, heads=16)
SMALL = GPTConfig(vocab=64, context=16, layers=2, width=32, heads=2)
BATCH, SMALL_BATCH = 4, 2
CPU_OFFLOAD: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}

__all__ = ["CPU_OFFLOAD", "Trainee", "make_config", "make_trainee", "single_rank_group", "store"]


class Trainee:
    """An engine with its model and one batch on its device."""

    def __init__(self, engine: rayzero.Engine, model: GPT, batch: tuple[Tensor, Tensor]) -> None:
        self.engine = engine
        self.model = model
        self.batch = batch

    def step(self) -> Tensor:
        """A whole step; returns its loss, which is not waited for."""
        loss: Tensor = self.engine(*self.batch)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def steps(self, number: int) -> list[float]:
        return [float(self.step()) for _ in range(number)]


def make_config(stage: int, **zero: Any) -> dict[str, Any]:
    """bf16 with fp32 main weights."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP_NORM,
        "bf16": {"enabled": True},
        "optimizer": OPTIMIZER,
        "zero_optimization": {"stage": stage, **zero},
    }


def make_trainee(
    settings: Settings,
    config: dict[str, Any],
    prepare: Callable[[GPT], object] = lambda model: None,
) -> Trainee:
    """A GPT on the settings' device, the same at every call.

    Args:
        prepare: called with the model before the engine takes it.
    """
    shape, batch = (SMALL, SMALL_BATCH) if settings.small else (MODEL, BATCH)
    torch.manual_seed(0)
    with torch.device(settings.device):
        model = GPT(shape)
    prepare(model)
    engine, *_ = rayzero.initialize(model=model, model_parameters=model.parameters(), config=config)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(shape.vocab, (batch, shape.context + 1), generator=generator)
    rows = rows.to(settings.device)
    return Trainee(engine, model, (rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))


def store(settings: Settings, name: str) -> Path:
    """A new path for a group's store."""
    return Path(settings.folder, f"store {name}")
