"""fp16 loss scaling.

fp16 has no numbers between zero and 6e-8, and many gradients are that small. Backward therefore
starts from a large number, the scale, and the optimizer divides by it (Micikevicius et al., "Mixed
Precision Training", 2018). A dynamic scale is halved when a gradient overflows and doubled after a
window of good steps. The rules and their order are DeepSpeed's. All ranks make the same calls, so
the scale is equal on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rayzero.engine.config.sections import Fp16Config

SCALE_FACTOR = 2.0  # the factor of one increase or decrease


@dataclass(frozen=True)
class FixedScaler:
    """A constant scale: 1 if no scale is needed, else the `fp16` section's `loss_scale`. A step
    that overflows is still skipped."""

    value: float = 1.0
    cannot_decrease: bool = False

    def update(self, *, overflow: bool) -> None:
        return

    def state_dict(self) -> dict[str, Any] | None:
        return None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        return


NO_SCALER = FixedScaler()


@dataclass(frozen=True)
class LossScaleState:
    """The state of a dynamic loss scale.

    Attributes:
        hysteresis: how many overflows it takes until the value is lowered. At 1, every overflow
            lowers it. Reset when the value is increased or, with `consecutive_hysteresis`, by any
            good step.
        good_steps: good steps since the last overflow, or since the start.
    """

    value: float
    hysteresis: int
    good_steps: int = 0


class DynamicScaler:
    """A scale that adapts to the gradients. `current` is replaced by a new object in each step."""

    def __init__(self, rules: Fp16Config) -> None:
        self._rules = rules
        self.current = LossScaleState(2.0**rules.initial_scale_power, rules.hysteresis)

    @property
    def value(self) -> float:
        """The factor by which the current step's loss is multiplied."""
        return self.current.value

    @property
    def cannot_decrease(self) -> bool:
        """Whether the scale is at its minimum and the next overflow would lower it."""
        return self.value == self._rules.min_loss_scale and self._next_overflow_decreases

    @property
    def _next_overflow_decreases(self) -> bool:
        return 1 in (self._rules.hysteresis, self.current.hysteresis)

    def update(self, *, overflow: bool) -> None:
        """Records a step. After an `overflow` the step was skipped: a gradient was not finite."""
        rules, old = self._rules, self.current
        value, hysteresis = old.value, old.hysteresis
        if overflow:
            if self._next_overflow_decreases:
                value = max(value / SCALE_FACTOR, rules.min_loss_scale)
            else:
                hysteresis -= 1
            self.current = LossScaleState(value, hysteresis)
            return
        # The last step of a window is the first step of the next window. So the first window is
        # one step longer than the others.
        increase = old.good_steps > 0 and old.good_steps % rules.loss_scale_window == 0
        if increase:
            value *= SCALE_FACTOR
        if increase or rules.consecutive_hysteresis:
            hysteresis = rules.hysteresis
        self.current = LossScaleState(value, hysteresis, old.good_steps + 1)

    def state_dict(self) -> dict[str, Any] | None:
        return asdict(self.current)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restores a state, clamped to this run's rules. Ignores None, from a run without such a
        scale."""
        if state is None:
            return
        self.current = LossScaleState(
            max(float(state["value"]), self._rules.min_loss_scale),
            min(int(state["hysteresis"]), self._rules.hysteresis),
            int(state["good_steps"]),
        )


LossScaler = FixedScaler | DynamicScaler
