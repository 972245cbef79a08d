"""Learning rates equal those that were recorded of DeepSpeed.

Step n, counted from 1, uses the rate of iteration n - 2: a schedule starts at iteration -1 and
advances after every optimizer step.
"""

from __future__ import annotations

import json
from math import log
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rayzero
from rayzero.engine.config import SchedulerConfig, parse_config
from rayzero.engine.config.schedules import LR_CURVES, LRCurve
from rayzero.engine.errors import ConfigError
from rayzero.engine.optim import deepspeed_schedules
from rayzero.engine.optim.deepspeed_schedules import StepSchedule, WarmupDecayLR, WarmupLR
from rayzero.engine.optim.schedule import Scheduler, check_schedule, make_schedule
from tests.engine.optim.make_deepspeed_schedules import FILE, LRS

TOP = 0.4  # the optimizer's configured lr


def test_default_warm_up() -> None:
    """Longer than the steps that were recorded of DeepSpeed's; numbers may be text."""
    curve = LR_CURVES["WarmupLR"](warmup_min_lr="0e-3")
    assert curve == LR_CURVES["WarmupLR"](warmup_num_steps="1e3")
    lrs = [curve.lr(step - 2, 0, TOP) for step in range(1, 1004)]
    assert lrs[501] == pytest.approx(TOP * log(501) / log(1000))
    assert lrs[999] < TOP
    assert lrs[1000] == pytest.approx(TOP)
    assert lrs[1001] == TOP


def optimizer(*lrs: float) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs]
    return torch.optim.SGD(groups, lr=1.0)


class LinearCurve(LRCurve):
    """The lr plus the iteration."""

    def lr(self, iteration: int, group: int, configured: float) -> float:
        return configured + iteration


def test_each_group_uses_its_own_lr_and_a_state_resumes_the_iteration() -> None:
    base_optimizer = optimizer(1.0, 10.0)
    schedule = StepSchedule(base_optimizer, LinearCurve())
    assert schedule.get_last_lr() == [0.0, 9.0]
    schedule.step()
    schedule.step()
    assert [group["lr"] for group in base_optimizer.param_groups] == [2.0, 11.0]
    second = StepSchedule(optimizer(1.0), LinearCurve())
    second.load_state_dict(schedule.state_dict())
    second.step()
    assert second.get_last_lr() == [3.0]


def test_loading_leaves_the_rates_to_the_optimizer() -> None:
    """As torch's schedulers do: the step after a load uses the lr in the optimizer's groups."""
    ours, plain = optimizer(1.0), optimizer(1.0)
    schedule = StepSchedule(ours, LinearCurve())
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


# What DeepSpeed's schedules derive from their parameters for themselves.
INTERNALS = """
delta_lrs inverse_log_warm_up org_lrs min_moms max_moms first_step_size first_stair_count step_ratio
skip_lr_decay skip_mom_decay step_size step_rate staircase
"""


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
    attributes = {
        name: it for name, it in row["attributes"].items() if name not in INTERNALS.split()
    }
    seen = {name: getattr(schedule, name) for name in attributes}
    seen |= {name: getattr(schedule, name)() for name in row["results"]}
    for name, value in (attributes | row["results"]).items():
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


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("WarmupLR", {"warmup_steps": 3}, r"scheduler\.params\.warmup_steps: .*'warmup_num_steps'"),
        ("WarmupLR", {"warmup_num_steps": -1}, "warmup_num_steps: .*greater than"),
        ("WarmupLR", {"warmup_type": 3}, "warmup_type: .*'log' or 'linear'"),
        ("WarmupDecayLR", {}, r"scheduler\.params\.total_num_steps: this key is required.*auto"),
        ("WarmupCosineLR", {"total_num_steps": "many"}, r"total_num_steps: .*seen: 'many'"),
        ("WarmupCosineLR", {"total_num_steps": 9, "warmup_max_lr": 1}, "warmup_max_lr: unknown"),
        ("LRRangeTest", {"lr_range_test_min_lr": [0.1, 0.2, 0.3]}, r"_min_lr: 3 values for 1"),
        ("StepLR", {"size": 1}, r"scheduler\.params: .*size"),
        ("StepLR", {"step_size": "many"}, r"scheduler\.params: "),
        ("StepR", {}, r"scheduler\.type: .*'StepLR'"),
        ("LambdaLR", {}, r"scheduler\.type: not a schedule that"),
    ],
)
def test_invalid_params(kind: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_config(kind, params, optimizer(TOP))


def from_config(kind: str, params: dict[str, Any], driven: torch.optim.Optimizer) -> Scheduler:
    parsed = parse_config({"scheduler": {"type": kind, "params": params}})
    assert parsed.scheduler is not None
    return make_schedule(parsed.scheduler, driven)


def test_schedules_of_torch_by_name_and_as_objects() -> None:
    driven = optimizer(1.0)
    schedule = from_config("StepLR", {"step_size": 1, "gamma": 0.5}, driven)
    driven.step()
    schedule.step()
    assert driven.param_groups[0]["lr"] == 0.5
    with pytest.raises(ConfigError, match="ReduceLROnPlateau requires arguments"):
        check_schedule(torch.optim.lr_scheduler.ReduceLROnPlateau(driven), driven)
    other = torch.optim.lr_scheduler.StepLR(optimizer(1.0), 1)
    with pytest.raises(ConfigError, match="StepLR drives an optimizer that is not the engine"):
        check_schedule(other, driven)
