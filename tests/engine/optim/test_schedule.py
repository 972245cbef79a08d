"""Learning rates equal those of DeepSpeed's schedules, also when resumed; arguments and errors."""

from __future__ import annotations

import json
from math import log
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

import rayzero
from rayzero.engine.config import SchedulerConfig, parse_config
from rayzero.engine.config.schedules import LR_CURVES
from rayzero.engine.errors import ConfigError
from rayzero.engine.optim import deepspeed_schedules
from rayzero.engine.optim.deepspeed_schedules import StepSchedule, WarmupDecayLR, WarmupLR
from rayzero.engine.optim.schedule import check_schedule, make_schedule
from rayzero.engine.session import use_session
from tests.engine.optim.make_deepspeed_schedules import FILE, LRS
from tests.engine.state.blocks import Block, StateSession

TOP = 0.4  # the optimizer's configured lr


def test_defaults_of_the_warm_up() -> None:
    curve = LR_CURVES["WarmupLR"]()
    lrs = {step: curve.lr(step - 1, 0, TOP) for step in (501, 999, 1000, 1001)}
    assert lrs[501] == pytest.approx(TOP * log(501) / log(1000))
    assert lrs[999] < TOP == lrs[1001]
    assert lrs[1000] == pytest.approx(TOP)


def optimizer(*lrs: float) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs]
    return torch.optim.SGD(groups, lr=1.0)


def test_loading_leaves_the_rates_to_the_optimizer() -> None:
    """As torch's schedulers do: the step after a load uses the lr in the optimizer's groups."""
    ours, plain = optimizer(1.0), optimizer(1.0)
    schedule = WarmupLR(ours, warmup_num_steps=9)
    torchs = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: float(step))
    states = {**schedule.state_dict(), "last_batch_iteration": 4}, torchs.state_dict()
    for group in (*ours.param_groups, *plain.param_groups):
        group["lr"] = 0.25  # restored from a checkpoint of another schedule
    schedule.load_state_dict(states[0])
    torchs.load_state_dict({**states[1], "last_epoch": 4})
    assert ours.param_groups[0]["lr"] == plain.param_groups[0]["lr"] == 0.25


def test_engine_advances_schedule_once_per_step() -> None:
    """A step uses the rate that was set before it."""
    engine, _, _, schedule = rayzero.initialize(
        model=nn.Linear(2, 1),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0,
            "optimizer": {"type": "SGD", "params": {"lr": TOP}},
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_num_steps": 2, "warmup_type": "linear"},
            },
        },
    )
    used = []
    for step in range(5):
        if step == 4:
            engine.lr_scheduler = None  # from now on the script steps it, as Lightning does
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
        used.append(engine.metrics.lr)
    assert used == pytest.approx([0, 0, TOP / 2, TOP, TOP])
    assert schedule is not None
    assert schedule.last_batch_iteration == 3
    assert schedule.get_last_lr() == [TOP]


@pytest.mark.parametrize("row", json.loads(FILE.read_text()), ids=lambda row: row["type"])
def test_equals_deepspeed(row: dict[str, Any]) -> None:
    """Recorded rates and betas of 22 steps with two groups."""
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in LRS]
    base_optimizer = torch.optim.Adam(groups, lr=1.0)
    schedule = make_schedule(
        SchedulerConfig(type=row["type"], params=row["params"]), base_optimizer
    )
    for lrs, betas in zip(row["lrs"], row["betas"], strict=True):
        assert [group["lr"] for group in base_optimizer.param_groups] == pytest.approx(
            lrs, rel=1e-12
        )
        for group, pair in zip(base_optimizer.param_groups, betas, strict=True):
            assert list(group["betas"]) == pytest.approx(pair, rel=1e-12)
        schedule.step()
    assert isinstance(schedule, getattr(deepspeed_schedules, row["type"]))
    schedule.step(3)
    assert schedule.state_dict() == row["state"]
    seen = {name: getattr(schedule, name) for name in row["attributes"]}
    seen |= {name: getattr(schedule, name)() for name in row["results"]}
    for name, value in (row["attributes"] | row["results"]).items():
        if isinstance(value, list | float):
            assert np.ravel(seen[name]) == pytest.approx(np.ravel(value), rel=1e-12), name
        else:
            assert seen[name] == value, name


def test_positional_arguments_are_in_deepspeeds_order() -> None:
    schedule = WarmupDecayLR(optimizer(1.0), 20, 0.1, 0.9, 4, "linear", 7)
    given = schedule.total_num_steps, schedule.min_lrs, schedule.max_lrs, schedule.warmup_type
    assert given == (20, [0.1], [0.9], "linear")
    assert schedule.last_batch_iteration == 7
    with pytest.raises(ConfigError, match="total_num_steps twice"):
        WarmupDecayLR(optimizer(1.0), 20, total_num_steps=20)


def test_a_wrapper_is_unwrapped() -> None:
    inner = optimizer(1.0)
    schedule = WarmupLR(SimpleNamespace(optimizer=inner), warmup_num_steps=2)  # type: ignore[arg-type]
    assert schedule.optimizer is inner
    with pytest.raises(ConfigError, match="given a dict"):
        WarmupLR({})  # type: ignore[arg-type]


def test_an_lr_that_is_a_tensor_stays_one() -> None:
    lr = torch.tensor(0.5)
    inner = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = WarmupLR(inner, warmup_num_steps=2, warmup_max_lr=0.25)
    for _ in range(4):
        schedule.step()
    assert inner.param_groups[0]["lr"] is lr
    assert lr == 0.25


def test_optimizer_without_betas_cycles_lr_only() -> None:
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 2}
    schedule = make_schedule(SchedulerConfig(type="OneCycle", params=params), optimizer(1.0))
    assert isinstance(schedule, StepSchedule)
    assert schedule.get_mom() is None
    assert schedule.get_last_lr() == [0.1]


def test_numbers_given_as_strings() -> None:
    assert LR_CURVES["WarmupLR"](warmup_num_steps="1e1").model_dump()["warmup_num_steps"] == 10
    assert LR_CURVES["WarmupLR"](warmup_min_lr="1e-3").model_dump()["warmup_min_lr"] == 1e-3


def from_config(kind: str, params: dict[str, Any]) -> None:
    parsed = parse_config({"scheduler": {"type": kind, "params": params}})
    assert parsed.scheduler is not None
    make_schedule(parsed.scheduler, optimizer(TOP))


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("WarmupLR", {"warmup_steps": 3}, r"scheduler\.params\.warmup_steps: .*'warmup_num_steps'"),
        ("WarmupLR", {"warmup_num_steps": -1}, "warmup_num_steps: .*greater than"),
        ("WarmupLR", {"warmup_type": 3}, "warmup_type: .*'log' or 'linear'"),
        ("WarmupDecayLR", {}, r"scheduler\.params\.total_num_steps: this key is required.*auto"),
        ("WarmupCosineLR", {"total_num_steps": "many"}, r"total_num_steps: .*seen: 'many'"),
        ("WarmupCosineLR", {"total_num_steps": 9, "warmup_max_lr": 1}, "warmup_max_lr: unknown"),
        ("LRRangeTest", {"lr_range_test_min_lr": [0.1, 0.2]}, r"_test_min_lr: 2 values for 1"),
        ("StepLR", {"size": 1}, r"scheduler\.params: .*size"),
        ("StepLR", {"step_size": "many"}, r"scheduler\.params: "),
        ("StepR", {}, r"scheduler\.type: .*'StepLR'"),
        ("LambdaLR", {}, r"scheduler\.type: not a schedule that"),
    ],
)
def test_invalid_settings(kind: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_config(kind, params)


def test_scheduler_that_needs_a_metric_is_rejected() -> None:
    base_optimizer = optimizer(1.0)
    with pytest.raises(ConfigError, match="ReduceLROnPlateau requires arguments"):
        check_schedule(torch.optim.lr_scheduler.ReduceLROnPlateau(base_optimizer), base_optimizer)


def test_scheduler_of_another_optimizer_is_rejected() -> None:
    other = torch.optim.lr_scheduler.StepLR(optimizer(1.0), 1)
    with pytest.raises(ConfigError, match="StepLR drives an optimizer that is not the engine"):
        check_schedule(other, optimizer(1.0))


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
