"""fp16 loss scaling, as pure state transitions.

fp16 has no numbers between zero and 6e-8, where many gradients are. Backward therefore starts from
a large number, the scale, and the optimizer divides by it (Micikevicius et al., "Mixed Precision
Training", 2018). A dynamic scale is halved when a gradient overflows and doubled after a window of
good steps. The rules and their order are DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

SCALE_FACTOR = 2.0  # of one increase or decrease


@dataclass(frozen=True)
class LossScaleState:
    """State of a dynamic loss scale; equal on all ranks.

    Attributes:
        value: factor of the loss.
        hysteresis: overflows until the value is lowered; 1: the next one lowers it.
        good_steps: steps since the last overflow, or since the start.
    """

    value: float
    hysteresis: int
    good_steps: int = 0


@dataclass(frozen=True)
class DynamicScaleRules:
    """Rules of a dynamic loss scale; see the `fp16` section of the config.

    Attributes:
        initial: the first value.
        window: good steps between two increases.
        hysteresis: overflows until the value is lowered. After that every overflow lowers it,
            until it was increased or, with `consecutive`, until a good step.
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

    def next_state(self, state: LossScaleState, *, overflow: bool) -> LossScaleState:
        """The state after a step."""
        if overflow:
            return self._decrease(state)
        hysteresis = self.hysteresis if self.consecutive else state.hysteresis
        # The last step of a window is the first of the next: the first window is one step longer.
        if state.good_steps and state.good_steps % self.window == 0:
            return LossScaleState(state.value * SCALE_FACTOR, self.hysteresis, state.good_steps + 1)
        return LossScaleState(state.value, hysteresis, state.good_steps + 1)

    def cannot_decrease(self, state: LossScaleState) -> bool:
        """Whether the scale is at its minimum and the next overflow would lower it."""
        return state.value == self.minimum and self._would_decrease(state)

    def _would_decrease(self, state: LossScaleState) -> bool:
        return self.hysteresis == 1 or state.hysteresis == 1

    def _decrease(self, state: LossScaleState) -> LossScaleState:
        if self._would_decrease(state):
            return LossScaleState(max(state.value / SCALE_FACTOR, self.minimum), state.hysteresis)
        return LossScaleState(state.value, state.hysteresis - 1)


class LossScaler(Protocol):
    """The loss scale of a run. All ranks make the same calls, so it is equal on all."""

    @property
    def value(self) -> float:
        """Factor of the loss in the current step."""

    @property
    def cannot_decrease(self) -> bool:
        """Whether another overflow could not be answered with a lower scale."""

    def update(self, *, overflow: bool) -> None:
        """Record a step; `overflow`: it was skipped because a gradient was not finite."""

    def state_dict(self) -> dict[str, Any] | None:
        """State to save, JSON-serialisable; None if there is none."""

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore what `state_dict` returned, possibly in another run."""


@dataclass(frozen=True)
class FixedScaler:
    """A constant scale: 1 where none is needed, or the `fp16` section's `loss_scale`. A step that
    overflows is still skipped."""

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
    """A scale that adapts to the gradients.

    Attributes:
        current: replaced as a whole after each step.
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
        """Restore a state, clamped to this run's rules."""
        if state is None:
            return
        self.current = LossScaleState(
            max(float(state["value"]), float(self._rules.minimum)),
            min(int(state["hysteresis"]), self._rules.hysteresis),
            int(state["good_steps"]),
        )
