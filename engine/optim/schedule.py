"""Learning-rate schedules as pure functions of the step, under DeepSpeed's names."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field

from rayzero.engine.config import SchedulerConfig
from rayzero.engine.validation import validated

# lr(step, the group's configured lr). As in DeepSpeed the first step of a run is number -1, the
# second 0: so warm-up begins with two steps at its lowest rate.
LearningRate = Callable[[int, float], float]


class Scheduler(Protocol):
    """What the engine needs of a schedule: torch's schedulers have it, and so do ours."""

    def step(self) -> Any:
        """One optimizer step was finished."""


class _Params(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    warmup_num_steps: int = Field(default=1000, gt=0)
    warmup_type: Literal["log", "linear"] = "log"

    def warmup(self, step: int) -> float:
        """From 0 to 1 over the warm-up, 1 after it."""
        length = max(2, self.warmup_num_steps)
        step = max(step, 0)
        if step >= length:
            return 1.0
        return math.log(step + 1) / math.log(length) if self.warmup_type == "log" else step / length


class _WarmupParams(_Params):
    warmup_min_lr: float = Field(default=0.0, ge=0)
    warmup_max_lr: float | None = Field(default=None, ge=0)

    def between(self, share: float, configured: float) -> float:
        top = configured if self.warmup_max_lr is None else self.warmup_max_lr
        return self.warmup_min_lr + (top - self.warmup_min_lr) * share


class _DecayParams(_WarmupParams):
    warmup_max_lr: float | None = Field(default=0.001, ge=0)  # DeepSpeed's, unlike WarmupLR's
    total_num_steps: int = Field(gt=0)


class _CosineParams(_Params):
    total_num_steps: int = Field(gt=0)
    warmup_min_ratio: float = Field(default=0.0, ge=0)
    cos_min_ratio: float = Field(default=0.0001, ge=0)


P = TypeVar("P", bound=_Params)


@dataclass(frozen=True)
class WarmupLR:
    """Up to the top over the warm-up, then constant."""

    params: _WarmupParams

    def __call__(self, step: int, configured: float) -> float:
        return self.params.between(self.params.warmup(step), configured)


@dataclass(frozen=True)
class WarmupDecayLR:
    """Up to the top over the warm-up, then down to zero in a line."""

    params: _DecayParams

    def __call__(self, step: int, configured: float) -> float:
        length = max(2, self.params.warmup_num_steps)
        if step < length:
            return self.params.between(self.params.warmup(step), configured)
        left = (self.params.total_num_steps - step) / max(1, self.params.total_num_steps - length)
        return self.params.between(max(0.0, left), configured)


@dataclass(frozen=True)
class WarmupCosineLR:
    """Up to the configured lr over the warm-up, then down along half a cosine."""

    params: _CosineParams

    def __call__(self, step: int, configured: float) -> float:
        p = self.params
        if step < 0:
            return 0.0
        length = max(2, p.warmup_num_steps)
        if step < length:
            return configured * (p.warmup_min_ratio + p.warmup(step) * (1 - p.warmup_min_ratio))
        done = min(1.0, (step - length + 1) / max(1, p.total_num_steps - length))
        wave = (1 + math.cos(math.pi * done)) / 2
        return configured * (p.cos_min_ratio + (1 - p.cos_min_ratio) * wave)


class StepSchedule:
    """Sets every group's lr from a pure function of the step. Has the surface users expect."""

    def __init__(self, optimizer: torch.optim.Optimizer, learning_rate: LearningRate) -> None:
        self._optimizer = optimizer
        self._learning_rate = learning_rate
        self._configured = [float(group["lr"]) for group in optimizer.param_groups]
        self.step_count = 0
        self._apply()

    def step(self) -> None:
        """One optimizer step was finished."""
        self.step_count += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        """Each group's lr now."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        return {"step_count": self.step_count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step_count = state["step_count"]
        self._apply()

    def _apply(self) -> None:
        for group, lr in zip(self._optimizer.param_groups, self._configured, strict=True):
            group["lr"] = self._learning_rate(self.step_count - 1, lr)


def _params(model: type[P], config: SchedulerConfig) -> P:
    return validated(model, config.params, f"scheduler.params for {config.type}")


def learning_rate(config: SchedulerConfig) -> LearningRate:
    """The function that a config's `scheduler` section asks for.

    Raises:
        ConfigError: a parameter is unknown or wrong.
    """
    if config.type == "WarmupLR":
        return WarmupLR(_params(_WarmupParams, config))
    if config.type == "WarmupDecayLR":
        return WarmupDecayLR(_params(_DecayParams, config))
    return WarmupCosineLR(_params(_CosineParams, config))
