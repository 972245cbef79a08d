"""Loss scaling follows tables computed by hand from DeepSpeed's DynamicLossScaler."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.config.sections import Fp16Config
from rayzero.engine.precision.loss_scale import DynamicScaler, FixedScaler, LossScaleState


def make_rules(
    initial_scale: float,
    window: int,
    hysteresis: int,
    *,
    consecutive: bool = False,
    minimum: float = 1,
) -> Fp16Config:
    return Fp16Config(
        initial_scale_power=int(log2(initial_scale)),
        loss_scale_window=window,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive,
        min_loss_scale=minimum,
    )


# A row: rules, then what each step was ("." good, "x" overflow), and the scale after each.
TABLE = [
    # The first rise takes window + 1 good steps, the following ones window each.
    (make_rules(16, 2, 1), ".....", [16, 16, 32, 32, 64]),
    (make_rules(16, 1, 1), "....", [16, 32, 64, 128]),
    # An overflow resets the count; without hysteresis it lowers the scale at once.
    (make_rules(16, 2, 1), "..x...x", [16, 16, 8, 8, 8, 16, 8]),
    # Hysteresis 2: the first overflow is free, the second lowers, and so does every one after it,
    # good steps between them or not, until the scale has risen.
    (make_rules(16, 2, 2), "x.x.x", [16, 16, 8, 8, 4]),
    (make_rules(16, 2, 2), "xx...xx", [16, 8, 8, 8, 16, 16, 8]),
    # A rise that comes due without an overflow before it leaves the hysteresis full.
    (make_rules(16, 2, 3), "...xxx", [16, 16, 32, 32, 32, 16]),
    # Consecutive: any good step gives the hysteresis back.
    (make_rules(16, 2, 2, consecutive=True), "x.x.xx", [16, 16, 16, 16, 16, 8]),
    (make_rules(16, 9, 2, consecutive=True), "xx.x", [16, 8, 8, 8]),
    # The minimum holds, also where the start was below it.
    (make_rules(4, 5, 1, minimum=3), "x", [3]),
    (make_rules(2, 5, 1, minimum=8), "x.", [8, 8]),
]


@pytest.mark.parametrize(("rules", "steps", "scales"), TABLE)
def test_scale_by_step(rules: Fp16Config, steps: str, scales: list[float]) -> None:
    scaler, values = DynamicScaler(rules), []
    for step in steps:
        scaler.update(overflow=step == "x")
        values.append(scaler.value)
    assert values == scales


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


@given(RULES, OVERFLOWS)
def test_invariants(rules: Fp16Config, overflows: list[bool]) -> None:
    scaler = DynamicScaler(rules)
    lowest = min(rules.min_loss_scale, scaler.value)
    for overflow in overflows:
        before = scaler.current
        scaler.update(overflow=overflow)
        after = scaler.current
        assert 1 <= after.hysteresis <= rules.hysteresis
        assert after.value >= lowest
        assert after.good_steps == (0 if overflow else before.good_steps + 1)
        if overflow:
            assert after.value <= max(before.value, rules.min_loss_scale)
        else:
            assert after.value in (before.value, 2 * before.value)


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
    scaler = DynamicScaler(make_rules(16, 2, 1, minimum=4))
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
