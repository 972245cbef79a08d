"""Makes and checks learning-rate schedules: DeepSpeed's, torch's, and the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch

from rayzero.engine.config import SchedulerConfig
from rayzero.engine.config.model import coerce_numbers
from rayzero.engine.errors import ConfigError
from rayzero.engine.optim.deepspeed_schedules import DEEPSPEED_SCHEDULES


class Scheduler(Protocol):
    """The scheduler interface that the engine uses. torch's schedulers have it."""

    def step(self) -> Any:
        """Advance after a finished optimizer step."""


def make_schedule(config: SchedulerConfig, optimizer: torch.optim.Optimizer) -> Scheduler:
    """Returns the scheduler that a config's `scheduler` section selects. Raises ConfigError if a
    parameter is unknown or wrong."""
    if config.type in DEEPSPEED_SCHEDULES:
        return DEEPSPEED_SCHEDULES[config.type](optimizer, **config.params)
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
    """Step such a scheduler with a dummy optimizer. torch detects some mistakes only in a step."""
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
    requires arguments, or if it drives another optimizer than `optimizer`."""
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
