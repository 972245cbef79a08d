"""Arguments of `initialize`, and the optimizer that it returns."""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import warnings
from pathlib import Path
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

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}
# DeepSpeed 0.19's, in its order: scripts pass some of them by position.
ARGUMENTS = tuple(
    (
        "args model optimizer model_parameters training_data lr_scheduler distributed_port mpu "
        "dist_init_required collate_fn config mesh_param config_params"
    ).split()
)


def initialize_and_get_lr(**arguments: Any) -> float:
    return rayzero.initialize(model=nn.Linear(3, 1), **arguments)[0].get_lr()[0]


def test_signature_equals_deepspeed() -> None:
    """Behind it is what DeepSpeed does not have, by keyword only."""
    *parameters, name = inspect.signature(rayzero.initialize).parameters.values()
    assert tuple(it.name for it in parameters) == ARGUMENTS
    assert (name.name, name.kind) == ("name", inspect.Parameter.KEYWORD_ONLY)


def test_config_sources(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    args = argparse.Namespace(deepspeed_config=str(path), local_rank=-1)
    assert (
        initialize_and_get_lr(config=CONFIG)
        == initialize_and_get_lr(config_params=str(path))
        == initialize_and_get_lr(args=args)
        == 0.1
    )
    assert initialize_and_get_lr(args=argparse.Namespace(deepspeed_config=None), config=path) == 0.1
    assert initialize_and_get_lr(args=args, config=CONFIG) == 0.1  # equal configs in two places


def test_different_configs_are_rejected() -> None:
    args = argparse.Namespace(deepspeed_config=CONFIG | {"gradient_clipping": 0.5})
    with pytest.raises(ConfigError, match=r"args\.deepspeed_config are different configs"):
        initialize_and_get_lr(args=args, config=CONFIG)


def test_default_optimizer_is_adamw_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Linear(3, 1)
    reference = nn.Linear(3, 1)
    reference.load_state_dict(model.state_dict())
    with caplog.at_level(logging.WARNING, "rayzero.engine"):
        engine, optimizer, *_ = rayzero.initialize(model=model, model_parameters=model.parameters())
    assert "AdamW with a learning rate of 1e-3" in caplog.text
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    for step in range(3):
        x = torch.full((4, 3), step + 1.0)
        engine.backward(engine(x).square().mean())
        engine.step()
        reference_optimizer.zero_grad()
        reference(x).square().mean().backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)  # DeepSpeed's default
        reference_optimizer.step()
    assert isinstance(optimizer, torch.optim.AdamW)
    torch.testing.assert_close(dict(model.state_dict()), dict(reference.state_dict()))


@pytest.mark.parametrize("name", ["mpu", "mesh_param"])
def test_unsupported_arguments(name: str) -> None:
    with pytest.raises(ConfigError, match="data parallel"):
        initialize_and_get_lr(config=CONFIG, **{name: object()})


def test_dist_init_required() -> None:
    with pytest.raises(ConfigError, match="no process group"):
        initialize_and_get_lr(config=CONFIG, dist_init_required=False)
    assert initialize_and_get_lr(config=CONFIG, dist_init_required=True) == 0.1


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
