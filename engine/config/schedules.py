"""Learning-rate schedules under DeepSpeed's names: params, and learning rates as pure functions.

Iterations count as in DeepSpeed: the first step of a run is iteration -1, the second is 0. A
warm-up therefore begins with two steps at its lowest rate.

Sources: warm-up and decay, Goyal et al. 2017 and Vaswani et al. 2017; half a cosine, Loshchilov and
Hutter 2017; one cycle and the range test, Smith 2018.
"""

from __future__ import annotations

import inspect
import logging
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

log = logging.getLogger("rayzero.engine")


def _validate_per_group(value: Any) -> Any:
    """Validates a `PerGroup`. A mistake gives one message; a union's would be one for each type."""
    is_list = isinstance(value, list | tuple)
    numbers = [parse_number(reject_bool(number)) for number in (value if is_list else [value])]
    if not all(isinstance(number, float) and 0 <= number < math.inf for number in numbers):
        raise ValueError("a number of at least 0 was expected, or a list of such numbers")
    return tuple(numbers) if is_list else numbers[0]


PerGroup: TypeAlias = Annotated[float | tuple[float, ...], BeforeValidator(_validate_per_group)]
"""One number, or one for each parameter group."""

BetaPair: TypeAlias = tuple[float, float]


class LRCurve(StrictModel):
    """A schedule's params and the learning rates that follow from them."""

    last_batch_iteration: Annotated[Integer, Field(ge=-1)] = -1

    @classmethod
    def arguments(cls) -> tuple[str, ...]:
        """Returns the names of the params in the order of DeepSpeed's arguments: a class's own come
        before inherited params."""
        names = (name for kind in cls.__mro__ for name in inspect.get_annotations(kind))
        return tuple(dict.fromkeys(name for name in names if name in cls.model_fields))

    def per_group_lengths(self) -> dict[str, int]:
        """Returns {name: length} of the params given as a list with one value per parameter
        group."""
        return {key: len(value) for key, value in self if isinstance(value, tuple)}

    def lr(self, iteration: int, group: int, configured: float) -> float:
        """Returns a parameter group's learning rate.

        Args:
            iteration: -1 in the first step.
            group: the group's number.
            configured: the lr that the optimizer was created with.
        """
        raise NotImplementedError

    def betas(self, iteration: int, group: int) -> BetaPair | None:
        """Returns a parameter group's Adam betas; None if the schedule does not change them."""
        return None


def value_for_group(value: float | tuple[float, ...], group: int) -> float:
    """Returns a parameter group's value; `value` is one number for all groups, or one for each."""
    return value[group] if isinstance(value, tuple) else value


def _known_warmup_type(value: Any) -> Any:
    """Replaces an unknown type by "log", with a warning, as DeepSpeed does."""
    if isinstance(value, str) and value not in ("log", "linear"):
        log.warning("warmup_type %r is unknown: log is used. Allowed: log, linear", value)
        return "log"
    return value


WarmupType: TypeAlias = Annotated[Literal["log", "linear"], BeforeValidator(_known_warmup_type)]


class _Warmup(LRCurve):
    warmup_num_steps: NonNegativeInt = 1000  # at least 2 are used
    warmup_type: WarmupType = "log"

    @property
    def length(self) -> int:
        """Steps of the warm-up."""
        return max(2, self.warmup_num_steps)

    def _fraction(self, iteration: int) -> float:
        """Returns the progress of the warm-up, 0 to 1."""
        length, iteration = self.length, max(iteration, 0)
        if iteration >= length:
            return 1.0
        linear = self.warmup_type == "linear"
        return iteration / length if linear else math.log(iteration + 1) / math.log(length)


class WarmupLR(_Warmup):
    """Warm-up to the maximum, by default each group's configured lr, then constant."""

    warmup_min_lr: PerGroup = 0.0
    warmup_max_lr: PerGroup | None = None

    def lr(self, iteration: int, group: int, configured: float) -> float:
        low, top = value_for_group(self.warmup_min_lr, group), configured
        if self.warmup_max_lr is not None:
            top = value_for_group(self.warmup_max_lr, group)
        return low + (top - low) * self._fraction(iteration)


class WarmupDecayLR(WarmupLR):
    """Warm-up to the maximum, then linear decay to the minimum. Unlike WarmupLR it has a default
    maximum, as in DeepSpeed."""

    total_num_steps: PositiveInt
    warmup_min_lr: PerGroup = 0.0
    warmup_max_lr: PerGroup | None = 0.001

    def _fraction(self, iteration: int) -> float:
        if iteration < self.length:
            return super()._fraction(iteration)
        remaining = self.total_num_steps - iteration
        return max(0.0, remaining / max(1, self.total_num_steps - self.length))


class WarmupCosineLR(_Warmup):
    """Warm-up to each group's configured lr, to which ratios are relative, then cosine decay."""

    total_num_steps: PositiveInt
    warmup_min_ratio: NonNegativeFloat = 0.0
    warmup_num_steps: NonNegativeInt = 1000
    cos_min_ratio: NonNegativeFloat = 0.0001
    warmup_type: WarmupType = "log"

    def lr(self, iteration: int, group: int, configured: float) -> float:
        if iteration < 0:
            return 0.0
        low, fraction = self.warmup_min_ratio, self._fraction(iteration)
        if iteration >= self.length:
            decay = max(1, self.total_num_steps - self.length)
            low = self.cos_min_ratio
            fraction = (1 + math.cos(math.pi * min(1.0, (iteration - self.length + 1) / decay))) / 2
        return configured * (low + (1 - low) * fraction)


class OneCycle(LRCurve):
    """One cycle between two rates, with the first beta (`mom`) moving inversely; then decay. Sizes
    are in steps."""

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

    def lr(self, iteration: int, group: int, configured: float) -> float:
        low = value_for_group(self.cycle_min_lr, group)
        high = value_for_group(self.cycle_max_lr, group)
        if iteration < self.total_size:
            return low + (high - low) * self._cycle_fraction(iteration + 1)
        return low / (1 + self.decay_lr_rate * self._decay_intervals(iteration))

    def betas(self, iteration: int, group: int) -> BetaPair | None:
        """Returns the betas. The second is DeepSpeed's constant. The first beta of the first step
        is the minimum, as in DeepSpeed."""
        if not self.cycle_momentum:
            return None
        low = value_for_group(self.cycle_min_mom, group)
        high = value_for_group(self.cycle_max_mom, group)
        if iteration < 0:
            return low, 0.99
        if iteration < self.total_size:
            return high - (high - low) * self._cycle_fraction(iteration + 1), 0.99
        return high * (1 + self.decay_mom_rate * self._decay_intervals(iteration)), 0.99

    @property
    def second_step_size(self) -> float:
        """Steps of the cycle's second half."""
        given = self.cycle_second_step_size
        return self.cycle_first_step_size if given is None else given

    @property
    def second_stair_count(self) -> int:
        """Number of stairs in the cycle's second half; 0 for a continuous change."""
        given = self.cycle_second_stair_count
        return self.cycle_first_stair_count if given is None else given

    @property
    def total_size(self) -> float:
        """Steps of the cycle."""
        return self.cycle_first_step_size + self.second_step_size

    def _cycle_fraction(self, step: int) -> float:
        """Returns the height in the cycle: 0 to 1 over the first half, then back to 0."""
        height, length = step % self.total_size, self.cycle_first_step_size
        stairs = self.cycle_first_stair_count
        if height > length:
            height, length = self.total_size - height, self.second_step_size
            stairs = self.second_stair_count
        return math.floor(height * stairs / length) / stairs if stairs else height / length

    def _decay_intervals(self, iteration: int) -> float:
        """Returns the number of decay intervals, also fractions, since the end of the cycle."""
        if math.isclose(self.decay_step_size, 0):
            return 0.0
        return (iteration - self.total_size + 1) / self.decay_step_size


class LRRangeTest(LRCurve):
    """Unbounded linear or stepwise increase from the lowest rate, to find rates that train."""

    lr_range_test_min_lr: PerGroup = 1e-3
    lr_range_test_step_size: PositiveInt = 2000
    lr_range_test_step_rate: FiniteFloat = 1.0
    lr_range_test_staircase: bool = False

    def lr(self, iteration: int, group: int, configured: float) -> float:
        intervals = (iteration + 1) / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            intervals = math.floor(intervals)
        low = value_for_group(self.lr_range_test_min_lr, group)
        return low * (1 + self.lr_range_test_step_rate * intervals)


LR_CURVES: dict[str, type[LRCurve]] = {
    curve.__name__: curve
    for curve in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
TORCH_SCHEDULES = tuple(
    (
        "ConstantLR LinearLR PolynomialLR ExponentialLR StepLR MultiStepLR CosineAnnealingLR "
        "CosineAnnealingWarmRestarts CyclicLR OneCycleLR"
    ).split()
)
"""Schedules of torch.optim.lr_scheduler with JSON-compatible arguments; torch checks them."""

SCHEDULES = (*LR_CURVES, *TORCH_SCHEDULES)
"""Names for `scheduler.type`, in any case."""
