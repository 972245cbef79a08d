"""DeepSpeed's learning-rate schedules, under its class names, with its arguments and attributes.

Parameters and rates are defined in `engine/config/schedules.py`. A config's `scheduler` section
makes an instance of the class that its `type` names. Attributes are read-only: the rates follow
from the parameters.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from rayzero.engine.config.model import parse_params
from rayzero.engine.config.schedules import LR_CURVES, BetaPair, LRCurve, value_for_group
from rayzero.engine.errors import ConfigError


class StepSchedule:
    """Sets every group's lr, and its betas if the curve has them, as a function of the iteration.

    Its methods are those of DeepSpeed's and torch's schedulers. `last_batch_iteration` is the
    number of finished steps minus one, as DeepSpeed counts.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, curve: LRCurve) -> None:
        for key, count in curve.per_group_lengths().items():
            if count != len(optimizer.param_groups):
                raise ConfigError(
                    f"scheduler.params.{key}: {count} values for {len(optimizer.param_groups)} "
                    "parameter groups",
                    allowed="one number, or one for each parameter group",
                )
        self.optimizer = optimizer
        self.curve = curve
        self._base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._has_betas = "betas" in optimizer.defaults
        self.last_batch_iteration = curve.last_batch_iteration
        if self.last_batch_iteration == -1:  # for other values, step 1 uses the configured lr
            self._set_group_options()

    def step(
        self, last_batch_iteration: int | None = None, *, batch_iteration: int | None = None
    ) -> None:
        """Advance by one iteration, or to the given one. DeepSpeed has both argument names."""
        given = batch_iteration if last_batch_iteration is None else last_batch_iteration
        self.last_batch_iteration = self.last_batch_iteration + 1 if given is None else given
        self._set_group_options()

    def get_lr(self) -> list[float]:
        """Returns each group's lr at this iteration."""
        iteration = self.last_batch_iteration
        return [self.curve.lr(iteration, group, lr) for group, lr in enumerate(self._base_lrs)]

    def get_last_lr(self) -> list[float]:
        """Returns the lr that each group has now."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_mom(self) -> list[BetaPair] | None:
        """Returns each group's betas at this iteration, or None if they do not cycle."""
        numbers = range(len(self._base_lrs))
        betas = [self.curve.betas(self.last_batch_iteration, number) for number in numbers]
        cycled = [pair for pair in betas if pair is not None]
        return cycled if self._has_betas and cycled else None

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restores the position. As in torch, the optimizer restores the groups' rates."""
        self.last_batch_iteration = state["last_batch_iteration"]

    def _set_group_options(self) -> None:
        groups = self.optimizer.param_groups
        for group, lr in zip(groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):  # compiled optimizers read this tensor
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        if momenta := self.get_mom():
            for group, betas in zip(groups, momenta, strict=True):
                group["betas"] = betas


class ConfiguredSchedule(StepSchedule):
    """A schedule with DeepSpeed's parameters, given in DeepSpeed's order or by name. Parameters are
    also attributes. Raises ConfigError if a parameter is unknown, missing or wrong."""

    def __init__(self, optimizer: torch.optim.Optimizer, *values: Any, **params: Any) -> None:
        model = LR_CURVES[type(self).__name__]
        named = dict(zip(model.arguments(), values, strict=False))
        if twice := named.keys() & params.keys():
            raise ConfigError(f"{type(self).__name__} was given {min(twice)} twice")
        curve = parse_params("scheduler", model, named | params)
        super().__init__(_torch_optimizer(optimizer), curve)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "curve":  # `__init__` has not set it yet
            raise AttributeError(name)
        return getattr(self.curve, name)

    def _of_groups(self, value: float | tuple[float, ...] | None) -> list[float]:
        """Returns a value for each group. None stands for the configured learning rates."""
        if value is None:
            return list(self._base_lrs)
        return [value_for_group(value, group) for group in range(len(self._base_lrs))]


def _torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Returns `optimizer`, or the torch optimizer that it wraps."""
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(candidate, torch.optim.Optimizer):
            return candidate
    raise ConfigError(
        f"a schedule was given a {type(optimizer).__name__}",
        allowed="a torch optimizer, or a wrapper with one in its attribute `optimizer`",
    )


def _param(name: str) -> Any:
    """Returns a property for the curve's attribute `name`, to be used under another name."""
    return property(lambda schedule: getattr(schedule.curve, name))


def _per_group(name: str) -> Any:
    """Returns a property for the curve's attribute `name`, with one value for each group."""
    return property(lambda schedule: schedule._of_groups(getattr(schedule.curve, name)))


class _Warmup(ConfiguredSchedule):
    warmup_num_steps = _param("length")
    inverse_log_warm_up = property(lambda self: 1.0 / math.log(self.warmup_num_steps))


class WarmupLR(_Warmup):
    """Warm-up to the maximum, then constant."""

    min_lrs = _per_group("warmup_min_lr")
    max_lrs = _per_group("warmup_max_lr")

    @property
    def delta_lrs(self) -> list[float]:
        """Maximum minus minimum of each group."""
        return [top - low for top, low in zip(self.max_lrs, self.min_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """Warm-up to the maximum, then linear decay to zero."""


class WarmupCosineLR(_Warmup):
    """Warm-up to the configured lr, then cosine decay."""

    org_lrs = property(lambda self: list(self._base_lrs))

    def get_lr_ratio(self) -> float:
        """Returns the ratio of the rates at this iteration to the configured rates."""
        return self.curve.lr(self.last_batch_iteration, 0, 1.0)


class OneCycle(ConfiguredSchedule):
    """One cycle between two rates, then decay; Adam's first beta cycles inversely."""

    min_lrs = _per_group("cycle_min_lr")
    max_lrs = _per_group("cycle_max_lr")
    min_moms = property(lambda self: [(beta, 0.99) for beta in self._of_groups(self.cycle_min_mom)])
    max_moms = property(lambda self: [(beta, 0.99) for beta in self._of_groups(self.cycle_max_mom)])
    first_step_size = _param("cycle_first_step_size")
    first_stair_count = _param("cycle_first_stair_count")
    cycle_momentum = property(lambda self: self.curve.cycle_momentum and self._has_betas)
    step_ratio = property(lambda self: self.first_step_size / self.total_size)
    skip_lr_decay = property(lambda self: 0 in (self.decay_step_size, self.decay_lr_rate))
    skip_mom_decay = property(lambda self: 0 in (self.decay_step_size, self.decay_mom_rate))


class LRRangeTest(ConfiguredSchedule):
    """Increases from the lowest rate without bound."""

    min_lr = _per_group("lr_range_test_min_lr")
    step_size = _param("lr_range_test_step_size")
    step_rate = _param("lr_range_test_step_rate")
    staircase = _param("lr_range_test_staircase")


DEEPSPEED_SCHEDULES: dict[str, type[ConfiguredSchedule]] = {
    cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
VALID_LR_SCHEDULES = list(DEEPSPEED_SCHEDULES)
