"""Learning rates as pure functions of the iteration, under DeepSpeed's names.

Iterations count as in DeepSpeed: the first step of a run is iteration -1, the second is 0. A
warm-up therefore begins with two steps at its lowest rate.

Sources: warm-up and decay, Goyal et al. 2017 and Vaswani et al. 2017; half a cosine, Loshchilov and
Hutter 2017; one cycle and the range test, Smith 2018.
"""

from __future__ import annotations

import math

from rayzero.engine.config.schedules import (
    LRRangeTestParams,
    OneCycleParams,
    ScheduleParams,
    WarmupCosineParams,
    WarmupDecayParams,
    WarmupParams,
)

BetaPair = tuple[float, float]


class LRCurve(ScheduleParams):
    """A schedule's params and the learning rates that follow from them."""

    def lr(self, iteration: int, group: int, configured: float) -> float:
        """A parameter group's learning rate.

        Args:
            iteration: -1 in the first step.
            group: the group's number.
            configured: the lr that the optimizer was created with.
        """
        raise NotImplementedError

    def betas(self, iteration: int, group: int) -> BetaPair | None:
        """A parameter group's Adam betas; None: unchanged."""
        return None


def value_for_group(value: float | tuple[float, ...], group: int) -> float:
    """A parameter group's value, of one for all groups or one for each."""
    return value[group] if isinstance(value, tuple) else value


def warmup_fraction(kind: str, num_steps: int, iteration: int) -> float:
    """Progress of the warm-up, 0 to 1; a warm-up has at least two steps."""
    length, iteration = max(2, num_steps), max(iteration, 0)
    if iteration >= length:
        return 1.0
    return iteration / length if kind == "linear" else math.log(iteration + 1) / math.log(length)


class WarmupLR(WarmupParams, LRCurve):
    """Warm-up to the maximum, by default the configured lr, then constant."""

    def lr(self, iteration: int, group: int, configured: float) -> float:
        low, top = value_for_group(self.warmup_min_lr, group), configured
        if self.warmup_max_lr is not None:
            top = value_for_group(self.warmup_max_lr, group)
        return low + (top - low) * self._fraction(iteration)

    def _fraction(self, iteration: int) -> float:
        return warmup_fraction(self.warmup_type, self.warmup_num_steps, iteration)


class WarmupDecayLR(WarmupDecayParams, WarmupLR):
    """Warm-up to the maximum, then linear decay to the minimum."""

    def _fraction(self, iteration: int) -> float:
        length = max(2, self.warmup_num_steps)
        if iteration < length:
            return super()._fraction(iteration)
        remaining = self.total_num_steps - iteration
        return max(0.0, remaining / max(1, self.total_num_steps - length))


class WarmupCosineLR(WarmupCosineParams, LRCurve):
    """Warm-up to the configured lr, then cosine decay."""

    def lr(self, iteration: int, group: int, configured: float) -> float:
        return configured * self._lr_ratio(iteration)

    def _lr_ratio(self, iteration: int) -> float:
        if iteration < 0:
            return 0.0
        length = max(2, self.warmup_num_steps)
        if iteration < length:
            fraction = warmup_fraction(self.warmup_type, length, iteration)
            return self.warmup_min_ratio + fraction * (1 - self.warmup_min_ratio)
        decay = max(1, self.total_num_steps - length)
        wave = (1 + math.cos(math.pi * min(1.0, (iteration - length + 1) / decay))) / 2
        return self.cos_min_ratio + (1 - self.cos_min_ratio) * wave


class OneCycle(OneCycleParams, LRCurve):
    """One cycle between two rates, with the first beta moving inversely; then decay."""

    def lr(self, iteration: int, group: int, configured: float) -> float:
        low = value_for_group(self.cycle_min_lr, group)
        high = value_for_group(self.cycle_max_lr, group)
        if iteration < self._cycle_size:
            return low + (high - low) * self._cycle_fraction(iteration + 1)
        return low / (1 + self.decay_lr_rate * self._decay_intervals(iteration))

    def betas(self, iteration: int, group: int) -> BetaPair | None:
        """The second beta is DeepSpeed's constant; the first step uses the lowest first beta."""
        if not self.cycle_momentum:
            return None
        low = value_for_group(self.cycle_min_mom, group)
        high = value_for_group(self.cycle_max_mom, group)
        if iteration < 0:
            return low, 0.99
        if iteration < self._cycle_size:
            return high - (high - low) * self._cycle_fraction(iteration + 1), 0.99
        return high * (1 + self.decay_mom_rate * self._decay_intervals(iteration)), 0.99

    @property
    def _second_step_size(self) -> float:
        given = self.cycle_second_step_size
        return self.cycle_first_step_size if given is None else given

    @property
    def _cycle_size(self) -> float:
        return self.cycle_first_step_size + self._second_step_size

    def _cycle_fraction(self, step: int) -> float:
        """Height in the cycle: 0 to 1 over its first part, back to 0 over the second."""
        height, length = step % self._cycle_size, self.cycle_first_step_size
        stairs = self.cycle_first_stair_count
        if height > length:
            height, length = self._cycle_size - height, self._second_step_size
            if self.cycle_second_stair_count is not None:
                stairs = self.cycle_second_stair_count
        return math.floor(height * stairs / length) / stairs if stairs else height / length

    def _decay_intervals(self, iteration: int) -> float:
        """Decay intervals since the end of the cycle."""
        if math.isclose(self.decay_step_size, 0):
            return 0.0
        return (iteration - self._cycle_size + 1) / self.decay_step_size


class LRRangeTest(LRRangeTestParams, LRCurve):
    """Unbounded linear or stepwise increase from the lowest rate, to find rates that train."""

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
