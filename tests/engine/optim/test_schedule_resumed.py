"""A schedule resumed from a state equals one that was not interrupted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

import rayzero
from rayzero.engine.session import use_session
from tests.engine.state.blocks import Block, StateSession

CYCLE = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3}
BY_CONFIG: dict[str, dict[str, Any]] = {
    "WarmupDecayLR": {"total_num_steps": 7, "warmup_num_steps": 3},
    "WarmupCosineLR": {"total_num_steps": 7, "warmup_num_steps": 3},
    "OneCycle": CYCLE | {"decay_step_size": 1, "decay_lr_rate": 0.5, "decay_mom_rate": 0.1},
    "LRRangeTest": {"lr_range_test_step_size": 2, "last_batch_iteration": 1},
    "CosineAnnealingLR": {"T_max": 5},
    "OneCycleLR": {"max_lr": 0.2, "total_steps": 9},
}
BY_FUNCTION: dict[str, Any] = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.ConstantLR(o, 0.1, 2), schedules.ExponentialLR(o, 0.9)], milestones=[2]
    ),
}


def rates(name: str, steps: int, block: Block | None = None) -> tuple[list[Any], Block]:
    torch.manual_seed(0)
    config: dict[str, Any] = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    if name in BY_CONFIG:
        config["scheduler"] = {"type": name, "params": BY_CONFIG[name]}
    with use_session(StateSession(None if block is None else [block])):
        engine, optimizer, *_ = rayzero.initialize(
            model=nn.Linear(2, 1), config=config, lr_scheduler=BY_FUNCTION.get(name)
        )
    values = []
    for _ in range(steps):
        group = optimizer.param_groups[0]
        values.append((float(group["lr"]), *group["betas"]))
        engine.backward(engine(torch.ones(4, 2)).sum())
        engine.step()
    return values, Block.of(engine)


@pytest.mark.parametrize("name", [*BY_CONFIG, *BY_FUNCTION])
@pytest.mark.parametrize("first", [1, 4])
def test_resume(name: str, first: int) -> None:
    uninterrupted, _ = rates(name, 8)
    before, block = rates(name, first)
    after, _ = rates(name, 8 - first, block)
    for actual, expected in zip(before + after, uninterrupted, strict=True):
        assert actual == pytest.approx(expected, rel=1e-12)
    assert len({lr for lr, *_ in uninterrupted}) > 2
