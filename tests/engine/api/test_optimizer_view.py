"""The optimizer that `initialize` returns: DeepSpeed's attributes over a torch optimizer."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import rayzero
from rayzero.deepspeed.ops import FusedAdam
from rayzero.deepspeed.optimizer import (
    DeepSpeedOptimizer,
    DeepSpeedZeroOptimizer,
    DeepSpeedZeroOptimizer_Stage3,
    DynamicLossScaler,
)
from rayzero.engine.errors import ConfigError
from rayzero.engine.optim.deepspeed_schedules import WarmupLR

KINDS = [
    DeepSpeedOptimizer,
    DeepSpeedZeroOptimizer,
    DeepSpeedZeroOptimizer,
    DeepSpeedZeroOptimizer_Stage3,
]


def initialize(stage: int, **config: Any) -> tuple[Any, Any, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    document = {"train_batch_size": 2, "zero_optimization": {"stage": stage}, **config}
    engine, returned, *_ = rayzero.initialize(model=model, optimizer=optimizer, config=document)
    return engine, returned, optimizer


@pytest.mark.parametrize("stage", range(4))
def test_attributes_in_fp16(stage: int) -> None:
    engine, returned, optimizer = initialize(stage, fp16={"enabled": True, "hysteresis": 1})
    assert isinstance(returned, KINDS[stage])
    assert isinstance(returned, torch.optim.SGD)
    assert returned.optimizer is optimizer
    assert returned.param_groups is optimizer.param_groups
    assert returned.dynamic_loss_scale
    assert isinstance(returned.loss_scaler, DynamicLossScaler)
    seen = []
    for factor in (1e5, 1e-4):
        returned.backward(engine(torch.ones(2, 3).half()).sum() * factor)
        engine.step()
        seen.append((returned.overflow, returned.loss_scale, returned.loss_scaler.cur_scale))
    assert seen == [(True, 2.0**15, 2.0**15), (False, 2.0**15, 2.0**15)]
    assert sum(param.numel() for param in returned.fp16_groups[0]) == 8
    with pytest.raises(ConfigError, match=r"fp16\.loss_scale in the config"):
        returned.loss_scale = 1.0


@pytest.mark.parametrize("inner", [False, True])
def test_torch_schedulers_drive_either_optimizer(inner: bool) -> None:
    engine, returned, optimizer = initialize(2)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer if inner else returned, lambda step: 0.5**step
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns if the optimizer was not stepped before
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 3)).sum())
            engine.step()
            schedule.step()
    assert engine.get_lr() == [0.125]
    assert engine.metrics.lr == 0.25


def test_what_a_config_makes_is_an_instance_of_deepspeeds_classes() -> None:
    engine, optimizer, _, schedule = rayzero.initialize(
        model=nn.Linear(3, 2),
        config={
            "train_batch_size": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        },
    )
    assert isinstance(optimizer, FusedAdam)
    assert not isinstance(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), FusedAdam)
    assert isinstance(schedule, WarmupLR)
    assert schedule.max_lrs == [0.1]
    assert engine.optimizer is optimizer
