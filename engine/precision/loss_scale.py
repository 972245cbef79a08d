"""The loss scale of fp16 as pure state, and what follows from a step that overflowed or did not.

fp16 has no numbers between zero and 6e-8, where many gradients are. So backward starts from a large
number, the scale, and the optimizer divides by it (Micikevicius et al., "Mixed Precision
Training", 2018). A dynamic scale is as large as gradients allow: halved when one overflows, doubled
after a while without. The rules, and the order in which they are applied, are those of DeepSpeed's
configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

SCALE_FACTOR = 2.0  # one rise or one fall


@dataclass(frozen=True)
class LossScaleState:
    """A point in the life of a dynamic loss scale; equal on all ranks.

    Attributes:
        value: what the loss is multiplied by.
        hysteresis: overflows left until the next one lowers the value; 1 for at once.
        good_steps: steps since the last overflow, or since the start.
    """

    value: float
    hysteresis: int
    good_steps: int = 0


@dataclass(frozen=True)
class DynamicScaleRules:
    """How a loss scale moves; the names are those of the `fp16` section.

    Attributes:
        initial: the first value.
        window: good steps between two rises.
        hysteresis: overflows until the value falls; falls go on at every overflow until it has
            risen again, or with `consecutive` until a step was good.
        consecutive: a good step restores the hysteresis.
        minimum: the lowest value.
    """

    initial: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    consecutive: bool = False
    minimum: float = 1.0

    def initial_state(self) -> LossScaleState:
        return LossScaleState(float(self.initial), self.hysteresis)

    def next_state(self, now: LossScaleState, *, overflow: bool) -> LossScaleState:
        """What follows a step that overflowed, or did not."""
        if overflow:
            return self._decrease(now)
        hysteresis = self.hysteresis if self.consecutive else now.hysteresis
        # The step that ends a window is the first of the next: so the first rise takes one more.
        if now.good_steps and now.good_steps % self.window == 0:
            return LossScaleState(now.value * SCALE_FACTOR, self.hysteresis, now.good_steps + 1)
        return LossScaleState(now.value, hysteresis, now.good_steps + 1)

    def cannot_decrease(self, now: LossScaleState) -> bool:
        """Whether one more overflow finds nothing left to lower."""
        return now.value == self.minimum and self._would_decrease(now)

    def _would_decrease(self, now: LossScaleState) -> bool:
        return self.hysteresis == 1 or now.hysteresis == 1

    def _decrease(self, now: LossScaleState) -> LossScaleState:
        if self._would_decrease(now):
            return LossScaleState(max(now.value / SCALE_FACTOR, self.minimum), now.hysteresis)
        return LossScaleState(now.value, now.hysteresis - 1)


class LossScaler(Protocol):
    """The loss scale of a run. All ranks call it alike, so it is the same on all."""

    @property
    def value(self) -> float:
        """What the loss is multiplied by in the step at hand."""

    @property
    def cannot_decrease(self) -> bool:
        """Whether an overflow now cannot be helped by another scale."""

    def update(self, *, overflow: bool) -> None:
        """A step was made, or skipped because a gradient was not finite."""

    def state_dict(self) -> dict[str, Any] | None:
        """What has to outlive this process, as JSON takes it; None for nothing."""

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Goes on from what `state` gave, of any run; None if that had nothing."""


@dataclass(frozen=True)
class FixedScaler:
    """A scale that never moves: 1 where none is needed, or the `fp16` section's own. A step that
    overflows is skipped all the same."""

    value: float = 1.0
    cannot_decrease: bool = False

    def update(self, *, overflow: bool) -> None:
        return

    def state_dict(self) -> dict[str, Any] | None:
        return None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        return


NO_SCALER = FixedScaler()


class DynamicScaler:
    """A scale that follows the gradients.

    Attributes:
        now: replaced whole, after each step.
    """

    def __init__(self, rules: DynamicScaleRules) -> None:
        self._rules = rules
        self.current = rules.initial_state()

    @property
    def value(self) -> float:
        return self.current.value

    @property
    def cannot_decrease(self) -> bool:
        return self._rules.cannot_decrease(self.current)

    def update(self, *, overflow: bool) -> None:
        self.current = self._rules.next_state(self.current, overflow=overflow)

    def state_dict(self) -> dict[str, Any] | None:
        return asdict(self.current)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """A state of a run with other rules is fitted to these."""
        if state is None:
            return
        self.current = LossScaleState(
            max(float(state["value"]), float(self._rules.minimum)),
            min(int(state["hysteresis"]), self._rules.hysteresis),
            int(state["good_steps"]),
        )
