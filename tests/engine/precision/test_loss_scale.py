"""Loss scaling follows the rules of DeepSpeed's DynamicLossScaler."""

from __future__ import annotations

import json
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.config.sections import Fp16Config
from rayzero.engine.precision.loss_scale import DynamicScaler, FixedScaler, LossScaleState


@dataclass
class DeepSpeedScaler:
    """DeepSpeed's implementation of the rules, based on step numbers instead of a count."""

    rules: Fp16Config

    def __post_init__(self) -> None:
        self.step, self.last_overflow, self.hysteresis = 0, -1, self.rules.hysteresis
        self.scale = 2.0**self.rules.initial_scale_power

    def update(self, overflow: bool) -> None:
        rules = self.rules
        if overflow:
            if 1 in (rules.hysteresis, self.hysteresis):
                self.scale = max(self.scale / 2, rules.min_loss_scale)
            else:
                self.hysteresis -= 1
            self.last_overflow = self.step
        else:
            if rules.consecutive_hysteresis:
                self.hysteresis = rules.hysteresis
            between = self.step - self.last_overflow - 1
            if between > 0 and between % rules.loss_scale_window == 0:
                if not rules.consecutive_hysteresis:
                    self.hysteresis = rules.hysteresis
                self.scale *= 2
        self.step += 1


RULES = st.builds(
    Fp16Config,
    initial_scale_power=st.integers(0, 30),
    loss_scale_window=st.integers(1, 6),
    hysteresis=st.integers(1, 4),
    consecutive_hysteresis=st.booleans(),
    min_loss_scale=st.sampled_from([0.25, 1, 2, 64]),
)
OVERFLOWS = st.lists(st.booleans(), max_size=60)


@given(RULES, OVERFLOWS)
def test_equals_deepspeed_scaler(rules: Fp16Config, overflows: list[bool]) -> None:
    scaler, expected = DynamicScaler(rules), DeepSpeedScaler(rules)
    for overflow in overflows:
        assert scaler.cannot_decrease == (
            expected.scale == rules.min_loss_scale and 1 in (rules.hysteresis, expected.hysteresis)
        )
        scaler.update(overflow=overflow)
        expected.update(overflow)
        assert (scaler.value, scaler.current.hysteresis) == (expected.scale, expected.hysteresis)


@given(RULES, OVERFLOWS, OVERFLOWS)
def test_state_dict_round_trip(rules: Fp16Config, before: list[bool], after: list[bool]) -> None:
    first, second = DynamicScaler(rules), DynamicScaler(rules)
    for overflow in before:
        first.update(overflow=overflow)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for overflow in after:
        first.update(overflow=overflow)
        second.update(overflow=overflow)
    if first.value >= rules.min_loss_scale:  # a load raises a start below the minimum
        assert first.current == second.current


def test_loaded_state_is_clamped_to_the_rules() -> None:
    scaler = DynamicScaler(Fp16Config(initial_scale_power=4, hysteresis=1, min_loss_scale=4))
    scaler.load_state_dict({"value": 1.0, "hysteresis": 3, "good_steps": 7})
    assert scaler.current == LossScaleState(4.0, 1, 7)
    scaler.load_state_dict(None)  # of a run without a scale
    assert scaler.current == LossScaleState(4.0, 1, 7)


def test_fixed_scale_is_constant() -> None:
    scaler = FixedScaler(128.0)
    scaler.load_state_dict({"value": 2.0, "hysteresis": 1, "good_steps": 0})
    for overflow in (True, False):
        scaler.update(overflow=overflow)
    assert (scaler.value, scaler.cannot_decrease, scaler.state_dict()) == (128.0, False, None)
