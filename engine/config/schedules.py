"""Params of each learning-rate schedule; `engine/optim` builds schedules from them."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from rayzero.engine.config.fields import (
    FiniteFloat,
    Integer,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    StrictModel,
    parse_number,
    reject_bool,
)


def _validate_per_group(value: Any) -> Any:
    """Gives one message, where a union would give one per type."""
    is_list = isinstance(value, list | tuple)
    numbers = [parse_number(reject_bool(number)) for number in (value if is_list else [value])]
    if not all(isinstance(number, float) and 0 <= number < math.inf for number in numbers):
        raise ValueError("a number of at least 0 was expected, or a list of such numbers")
    return tuple(numbers) if is_list else numbers[0]


PerGroup: TypeAlias = Annotated[float | tuple[float, ...], BeforeValidator(_validate_per_group)]
"""One number, or one for each parameter group."""


class ScheduleParams(StrictModel):
    """Params of every DeepSpeed schedule."""

    last_batch_iteration: Annotated[Integer, Field(ge=-1)] = -1

    def per_group_lengths(self) -> dict[str, int]:
        """{param given as a list, one value per parameter group: length}."""
        return {key: len(value) for key, value in self if isinstance(value, tuple)}


class _WarmupParams(ScheduleParams):
    warmup_num_steps: NonNegativeInt = 1000  # at least 2 are used
    warmup_type: Literal["log", "linear"] = "log"


class WarmupParams(_WarmupParams):
    """WarmupLR. The default of `warmup_max_lr` is each group's configured lr."""

    warmup_min_lr: PerGroup = 0.0
    warmup_max_lr: PerGroup | None = None


class WarmupDecayParams(WarmupParams):
    """WarmupDecayLR; unlike WarmupLR it has a default maximum, as in DeepSpeed."""

    warmup_max_lr: PerGroup | None = 0.001
    total_num_steps: PositiveInt


class WarmupCosineParams(_WarmupParams):
    """WarmupCosineLR. Ratios are relative to each group's configured lr."""

    total_num_steps: PositiveInt
    warmup_min_ratio: NonNegativeFloat = 0.0
    cos_min_ratio: NonNegativeFloat = 0.0001


class OneCycleParams(ScheduleParams):
    """OneCycle. Sizes are in steps, `mom` is Adam's first beta."""

    cycle_min_lr: PerGroup
    cycle_max_lr: PerGroup
    decay_lr_rate: FiniteFloat = 0.0
    cycle_first_step_size: Annotated[NonNegativeFloat, Field(gt=0)] = 2000.0
    cycle_second_step_size: NonNegativeFloat | None = None
    cycle_first_stair_count: NonNegativeInt = 0
    cycle_second_stair_count: NonNegativeInt | None = None
    decay_step_size: NonNegativeFloat = 0.0
    cycle_momentum: bool = True
    cycle_min_mom: PerGroup = 0.8
    cycle_max_mom: PerGroup = 0.9
    decay_mom_rate: FiniteFloat = 0.0


class LRRangeTestParams(ScheduleParams):
    """LRRangeTest."""

    lr_range_test_min_lr: PerGroup = 1e-3
    lr_range_test_step_size: PositiveInt = 2000
    lr_range_test_step_rate: FiniteFloat = 1.0
    lr_range_test_staircase: bool = False


SCHEDULE_PARAMS: dict[str, type[ScheduleParams]] = {
    "WarmupLR": WarmupParams,
    "WarmupDecayLR": WarmupDecayParams,
    "WarmupCosineLR": WarmupCosineParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": LRRangeTestParams,
}
TORCH_SCHEDULES = (
    *("ConstantLR", "LinearLR", "PolynomialLR", "ExponentialLR", "StepLR", "MultiStepLR"),
    *("CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "OneCycleLR"),
)
"""Schedules of torch.optim.lr_scheduler with JSON-compatible arguments; torch checks them."""

SCHEDULES = (*SCHEDULE_PARAMS, *TORCH_SCHEDULES)
"""Names for `scheduler.type`, in any case."""
