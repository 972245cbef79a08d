"""Learning rates equal hand-computed values of DeepSpeed's formulas, and DeepSpeed's own.

Step n, counted from 1, uses the rate of iteration n - 2: a schedule starts at iteration -1 and
advances after every optimizer step.
"""

from __future__ import annotations

import json
from math import cos, log, pi
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
from rayzero.engine.optim.schedule import check_schedule, make_schedule
from tests.engine.optim.make_deepspeed_schedules import FILE, LRS

TOP = 0.4  # the optimizer's configured lr


def rates(kind: Any, steps: int, **params: Any) -> list[float]:
    """Learning rate of each of the first steps."""
    curve = LR_CURVES[kind](**params)
    return [curve.lr(step - 2, 0, TOP) for step in range(1, steps + 1)]


class TestWarmupLR:
    def test_linear(self) -> None:
        lrs = rates("WarmupLR", 7, warmup_num_steps=4, warmup_type="linear", warmup_max_lr=0.8)
        assert lrs == pytest.approx([0, 0, 0.2, 0.4, 0.6, 0.8, 0.8])

    def test_log(self) -> None:
        lrs = rates("WarmupLR", 7, warmup_num_steps=4, warmup_max_lr=0.8, warmup_min_lr=0.2)
        ratios = [0, 0, log(2) / log(4), log(3) / log(4), 1, 1, 1]
        assert lrs == pytest.approx([0.2 + 0.6 * ratio for ratio in ratios])

    def test_maximum_defaults_to_the_optimizers_lr(self) -> None:
        assert rates("WarmupLR", 5, warmup_num_steps=2)[-1] == TOP

    def test_defaults(self) -> None:
        lrs = rates("WarmupLR", 1003)
        assert lrs[501] == pytest.approx(TOP * log(501) / log(1000))
        assert lrs[999] < TOP
        assert lrs[1000] == pytest.approx(TOP)
        assert lrs[1001] == TOP

    def test_warm_up_has_at_least_two_steps(self) -> None:
        assert rates("WarmupLR", 4, warmup_num_steps=1, warmup_type="linear") == pytest.approx(
            [0, 0, TOP / 2, TOP]
        )


class TestWarmupDecayLR:
    def test_linear_up_and_down(self) -> None:
        lrs = rates(
            "WarmupDecayLR",
            14,
            total_num_steps=10,
            warmup_num_steps=2,
            warmup_max_lr=0.8,
            warmup_type="linear",
        )
        down = [0.8 * (10 - step) / 8 for step in range(2, 11)]
        assert lrs == pytest.approx([0, 0, 0.4, *down, 0, 0])

    def test_minimum_applies_at_both_ends(self) -> None:
        lrs = rates("WarmupDecayLR", 9, total_num_steps=6, warmup_num_steps=2, warmup_min_lr=0.0005)
        assert lrs[:2] == [0.0005] * 2
        assert lrs[-1] == 0.0005

    def test_default_maximum_equals_deepspeed(self) -> None:
        lrs = rates("WarmupDecayLR", 4, total_num_steps=10, warmup_num_steps=2)
        assert max(lrs) == pytest.approx(0.001)

    def test_total_shorter_than_the_warm_up_has_no_decay(self) -> None:
        lrs = rates("WarmupDecayLR", 7, total_num_steps=2, warmup_num_steps=4)
        assert lrs[4] > 0
        assert lrs[5:] == [0, 0]


class TestWarmupCosineLR:
    def test_hand_computed_values(self) -> None:
        lrs = rates(
            "WarmupCosineLR",
            12,
            total_num_steps=8,
            warmup_num_steps=4,
            warmup_type="linear",
            warmup_min_ratio=0.2,
            cos_min_ratio=0.1,
        )
        # Iteration -1 has rate 0; the warm-up starts at its minimum in the second step.
        up = [0, *(0.2 + 0.8 * step / 4 for step in range(4))]
        down = [0.1 + 0.9 * (1 + cos(pi * step / 4)) / 2 for step in (1, 2, 3, 4, 4, 4, 4)]
        assert lrs == pytest.approx([TOP * ratio for ratio in [*up, *down]])

    def test_log_and_default_minimum(self) -> None:
        lrs = rates("WarmupCosineLR", 20, total_num_steps=10, warmup_num_steps=3)
        assert lrs[:4] == pytest.approx([0, 0, TOP * log(2) / log(3), TOP])
        assert lrs[-1] == pytest.approx(TOP * 0.0001)

    def test_total_shorter_than_the_warm_up_ends_at_the_minimum(self) -> None:
        lrs = rates("WarmupCosineLR", 8, total_num_steps=2, warmup_num_steps=4)
        assert lrs[5:] == pytest.approx([TOP * 0.0001] * 3)


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("WarmupLR", {"warmup_steps": 3}, r"scheduler\.params\.warmup_steps: .*'warmup_num_steps'"),
        ("WarmupLR", {"warmup_num_steps": -1}, "warmup_num_steps: .*greater than"),
        ("WarmupLR", {"warmup_type": 3}, "warmup_type: .*'log' or 'linear'"),
        ("WarmupDecayLR", {}, r"scheduler\.params\.total_num_steps: this key is required.*auto"),
        ("WarmupCosineLR", {"total_num_steps": "many"}, r"total_num_steps: .*seen: 'many'"),
        ("WarmupCosineLR", {"total_num_steps": 9, "warmup_max_lr": 1}, "warmup_max_lr: unknown"),
    ],
)
def test_invalid_params(kind: Any, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_schedule(SchedulerConfig(type=kind, params=params), optimizer(TOP))


def optimizer(*lrs: float) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs]
    return torch.optim.SGD(groups, lr=1.0)


class LinearCurve(LRCurve):
    """The lr plus the iteration."""

    def lr(self, iteration: int, group: int, configured: float) -> float:
        return configured + iteration


def test_each_group_uses_its_own_lr() -> None:
    base_optimizer = optimizer(1.0, 10.0)
    schedule = StepSchedule(base_optimizer, LinearCurve())
    assert schedule.get_last_lr() == [0.0, 9.0]
    schedule.step()
    schedule.step()
    assert [group["lr"] for group in base_optimizer.param_groups] == [2.0, 11.0]


def test_state_dict_resumes_the_iteration() -> None:
    first = StepSchedule(optimizer(1.0), LinearCurve())
    for _ in range(5):
        first.step()
    second = StepSchedule(optimizer(1.0), LinearCurve())
    second.load_state_dict(first.state_dict())
    second.step()
    first.step()
    assert second.get_last_lr() == first.get_last_lr() == [6.0]


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


def test_list_needs_a_value_per_group() -> None:
    params = {"lr_range_test_min_lr": [0.1, 0.2, 0.3]}
    with pytest.raises(ConfigError, match=r"params\.lr_range_test_min_lr: 3 values for 2"):
        make_schedule(SchedulerConfig(type="LRRangeTest", params=params), optimizer(1.0, 1.0))


def from_config(kind: str, params: dict[str, Any]) -> None:
    parsed = parse_config({"scheduler": {"type": kind, "params": params}})
    assert parsed.scheduler is not None
    make_schedule(parsed.scheduler, optimizer(1.0))


class TestTorchSchedules:
    def test_by_name(self) -> None:
        base_optimizer = optimizer(1.0)
        schedule = make_schedule(
            SchedulerConfig(type="StepLR", params={"step_size": 1, "gamma": 0.5}), base_optimizer
        )
        base_optimizer.step()
        schedule.step()
        assert base_optimizer.param_groups[0]["lr"] == 0.5

    @pytest.mark.parametrize(
        ("kind", "params", "message"),
        [
            ("StepLR", {"size": 1}, r"scheduler\.params: .*size"),
            ("StepLR", {"step_size": "many"}, r"scheduler\.params: "),
            ("StepR", {}, r"scheduler\.type: .*'StepLR'"),
            ("LambdaLR", {}, r"scheduler\.type: not a schedule that"),
        ],
    )
    def test_invalid_arguments(self, kind: str, params: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            from_config(kind, params)

    def test_scheduler_that_needs_a_metric_is_rejected(self) -> None:
        base_optimizer = optimizer(1.0)
        with pytest.raises(ConfigError, match="ReduceLROnPlateau requires arguments"):
            check_schedule(
                torch.optim.lr_scheduler.ReduceLROnPlateau(base_optimizer), base_optimizer
            )

    def test_scheduler_of_another_optimizer_is_rejected(self) -> None:
        other = torch.optim.lr_scheduler.StepLR(optimizer(1.0), 1)
        with pytest.raises(ConfigError, match="StepLR drives an optimizer that is not the engine"):
            check_schedule(other, optimizer(1.0))
