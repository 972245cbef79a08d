"""`deepspeed.runtime.lr_schedules`: schedules as classes of an optimizer, as scripts make them."""

from __future__ import annotations

from typing import Any

import torch

from rayzero.engine.config import SchedulerConfig
from rayzero.engine.optim.schedule import StepSchedule, make_lr_curve

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]


class _ConfiguredSchedule(StepSchedule):
    """The schedule that the config's `scheduler` section makes of the class's name."""

    def __init__(self, optimizer: torch.optim.Optimizer, **params: Any) -> None:
        config = SchedulerConfig.model_validate({"type": type(self).__name__, "params": params})
        super().__init__(optimizer, make_lr_curve(config))


class WarmupLR(_ConfiguredSchedule):
    """Up to the top over the warm-up, then constant. Parameters as in the config."""


class WarmupDecayLR(_ConfiguredSchedule):
    """Up to the top over the warm-up, then down to zero in a line."""


class WarmupCosineLR(_ConfiguredSchedule):
    """Up to the configured lr over the warm-up, then down along half a cosine."""


class OneCycle(_ConfiguredSchedule):
    """Up and down once between two rates, then decay; Adam's first beta goes the other way."""


class LRRangeTest(_ConfiguredSchedule):
    """Up from the lowest rate without end."""
