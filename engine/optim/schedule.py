"""Learning-rate schedules: DeepSpeed's as functions of the step, torch's, and the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch

from rayzero.engine.config import SchedulerConfig
from rayzero.engine.config.model import coerce_numbers, parse_params
from rayzero.engine.config.schedules import LR_CURVES, BetaPair, LRCurve
from rayzero.engine.errors import ConfigError


class Scheduler(Protocol):
    """The scheduler interface that the engine uses; torch's schedulers have it."""

    def step(self) -> Any:
        """Advance after a finished optimizer step."""


class StepSchedule:
    """Sets lr, and betas if the curve has them, of every group as a function of the iteration.

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
        if self.last_batch_iteration == -1:  # else step 1 uses the configured lr
            self._set_group_options()

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance by one iteration, or to the given one."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._set_group_options()

    def get_lr(self) -> list[float]:
        """Each group's lr at this iteration."""
        iteration = self.last_batch_iteration
        return [self.curve.lr(iteration, group, lr) for group, lr in enumerate(self._base_lrs)]

    def get_last_lr(self) -> list[float]:
        """Each group's lr now."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_mom(self) -> list[BetaPair] | None:
        """Each group's betas at this iteration; None where they do not cycle."""
        numbers = range(len(self._base_lrs))
        betas = [self.curve.betas(self.last_batch_iteration, number) for number in numbers]
        cycled = [pair for pair in betas if pair is not None]
        return cycled if self._has_betas and cycled else None

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.last_batch_iteration = state["last_batch_iteration"]
        if self.last_batch_iteration != self.curve.last_batch_iteration:
            self._set_group_options()

    def _set_group_options(self) -> None:
        groups = self.optimizer.param_groups
        for group, lr in zip(groups, self.get_lr(), strict=True):
            group["lr"] = lr
        if momenta := self.get_mom():
            for group, betas in zip(groups, momenta, strict=True):
                group["betas"] = betas


def make_lr_curve(config: SchedulerConfig) -> LRCurve:
    """One of DeepSpeed's schedules. Raises ConfigError if a parameter is unknown or wrong."""
    return parse_params("scheduler", LR_CURVES[config.type], config.params)


def make_schedule(config: SchedulerConfig, optimizer: torch.optim.Optimizer) -> Scheduler:
    """The scheduler that a config's `scheduler` section selects. Raises ConfigError if a parameter
    is unknown or wrong."""
    if config.type in LR_CURVES:
        return StepSchedule(optimizer, make_lr_curve(config))
    make: Callable[..., Scheduler] = getattr(torch.optim.lr_scheduler, config.type)
    params = coerce_numbers(config.params)
    try:
        _dry_run(make, params, optimizer)
        return make(optimizer, **params)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        raise ConfigError(
            f"engine config: scheduler.params: {error}",
            allowed=f"the arguments of torch.optim.lr_scheduler.{config.type}",
        ) from None


def _dry_run(
    make: Callable[..., Scheduler], params: dict[str, Any], optimizer: torch.optim.Optimizer
) -> None:
    """Step such a scheduler with a dummy optimizer: torch detects some mistakes only then."""
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": group["lr"]}
        for group in optimizer.param_groups
    ]
    betas = "betas" in optimizer.defaults
    dummy = torch.optim.Adam(groups) if betas else torch.optim.SGD(groups, momentum=0.9)
    schedule = make(dummy, **params)
    dummy.step()
    schedule.step()


def check_schedule(scheduler: Scheduler, optimizer: torch.optim.Optimizer) -> Scheduler:
    """Return the user's own scheduler if the engine can step it. Raises ConfigError if its `step`
    requires arguments, or it drives another optimizer."""
    name = type(scheduler).__name__
    try:
        inspect.signature(scheduler.step).bind()
    except ValueError:  # a builtin without a signature
        pass
    except TypeError:
        raise ConfigError(
            f"step() of the scheduler {name} requires arguments",
            allowed="schedulers whose step() takes no arguments",
            fix=f"leave lr_scheduler out, make {name} over engine.optimizer, and step it yourself",
        ) from None
    driven = getattr(scheduler, "optimizer", optimizer)
    while not isinstance(driven, torch.optim.Optimizer) and hasattr(driven, "optimizer"):
        driven = driven.optimizer  # a wrapper
    if isinstance(driven, torch.optim.Optimizer) and driven is not optimizer:
        raise ConfigError(
            f"the scheduler {name} drives an optimizer that is not the engine's",
            allowed="a scheduler of the optimizer given to initialize, or a function of the "
            "optimizer that makes one",
            fix=f"initialize(lr_scheduler=lambda optimizer: {name}(optimizer, ...))",
        )
    return scheduler
