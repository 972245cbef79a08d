"""An engine that is saved and loaded, and its training."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

import rayzero
from tests.engine import zoo

SAMPLES = 12


WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_type": "linear"}}


def make_engine(
    stage: int,
    model: nn.Module | None = None,
    zero: Mapping[str, Any] = MappingProxyType({}),
    **more: Any,
) -> rayzero.Engine:
    model = zoo.make_model(torch.float64) if model is None else model
    return rayzero.initialize(
        model=model,
        model_parameters=zoo.two_groups(model),
        config={
            "gradient_clipping": 0,
            "train_batch_size": SAMPLES,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 150, **zero},
            **more,
        },
    )[0]


def train(engine: rayzero.Engine, steps: range) -> None:
    zoo.train(engine, list(zoo.batches(steps.stop, SAMPLES))[steps.start :])
