"""The params of each schedule, as data. What follows from them is in `engine/optim/curves`."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from rayzero.engine.config.fields import (
    ConfigSection,
    Integer,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    parse_number,
    reject_bool,
)

SignedNumber: TypeAlias = Annotated[
    float, BeforeValidator(reject_bool), BeforeValidator(parse_number), Field(allow_inf_nan=False)
]


def _validate_per_group(value: Any) -> Any:
    """Said here, because a union would complain of each of its types."""
    several = isinstance(value, list | tuple)
    found = [parse_number(reject_bool(one)) for one in (value if several else [value])]
    if not all(isinstance(one, float) and 0 <= one < math.inf for one in found):
        raise ValueError("a number of at least 0 was expected, or a list of such numbers")
    return tuple(found) if several else found[0]


PerGroup: TypeAlias = Annotated[float | tuple[float, ...], BeforeValidator(_validate_per_group)]
"""One number, or one for each parameter group."""


class ScheduleParams(ConfigSection):
    """What every schedule of DeepSpeed's has."""

    last_batch_iteration: Annotated[Integer, Field(ge=-1)] = -1

    def per_group_lengths(self) -> dict[str, int]:
        """The params that are given group by group, with the number of their values."""
        return {key: len(one) for key, one in self if isinstance(one, tuple)}


class _WarmupParams(ScheduleParams):
    warmup_num_steps: NonNegativeInt = 1000  # two at least, whatever is said
    warmup_type: Literal["log", "linear"] = "log"


class WarmupParams(_WarmupParams):
    """WarmupLR's. Without `warmup_max_lr` the top is each group's configured lr."""

    warmup_min_lr: PerGroup = 0.0
    warmup_max_lr: PerGroup | None = None


class WarmupDecayParams(WarmupParams):
    """WarmupDecayLR's; unlike WarmupLR it has a top of its own, as in DeepSpeed."""

    warmup_max_lr: PerGroup | None = 0.001
    total_num_steps: PositiveInt


class WarmupCosineParams(_WarmupParams):
    """WarmupCosineLR's. Ratios are of each group's configured lr."""

    total_num_steps: PositiveInt
    warmup_min_ratio: NonNegativeFloat = 0.0
    cos_min_ratio: NonNegativeFloat = 0.0001


class OneCycleParams(ScheduleParams):
    """OneCycle's. Sizes are counted in steps, `mom` is Adam's first beta."""

    cycle_min_lr: PerGroup
    cycle_max_lr: PerGroup
    decay_lr_rate: SignedNumber = 0.0
    cycle_first_step_size: Annotated[NonNegativeFloat, Field(gt=0)] = 2000.0
    cycle_second_step_size: NonNegativeFloat | None = None
    cycle_first_stair_count: NonNegativeInt = 0
    cycle_second_stair_count: NonNegativeInt | None = None
    decay_step_size: NonNegativeFloat = 0.0
    cycle_momentum: bool = True
    cycle_min_mom: PerGroup = 0.8
    cycle_max_mom: PerGroup = 0.9
    decay_mom_rate: SignedNumber = 0.0


class LRRangeTestParams(ScheduleParams):
    """LRRangeTest's."""

    lr_range_test_min_lr: PerGroup = 1e-3
    lr_range_test_step_size: PositiveInt = 2000
    lr_range_test_step_rate: SignedNumber = 1.0
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
"""Those of torch.optim.lr_scheduler whose arguments a config file can hold; torch checks them."""

SCHEDULES = (*SCHEDULE_PARAMS, *TORCH_SCHEDULES)
"""All that `scheduler.type` may name, in any case."""
