"""Loss scaling follows the rules of DeepSpeed's DynamicLossScaler."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product

import pytest

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


RULES = [
    Fp16Config(
        initial_scale_power=4,
        loss_scale_window=window,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive,
        min_loss_scale=minimum,
    )
    for window, hysteresis, consecutive, minimum in product(
        (1, 2, 3), (1, 2, 3), (False, True), (0.25, 8, 64)
    )
]


@pytest.mark.parametrize("rules", RULES)
def test_equals_deepspeed_scaler(rules: Fp16Config) -> None:
    """With every sequence of nine good steps and overflows; saved and loaded in between."""
    for overflows in product((False, True), repeat=9):
        scaler, expected = DynamicScaler(rules), DeepSpeedScaler(rules)
        for number, overflow in enumerate(overflows):
            assert scaler.cannot_decrease == (
                expected.scale == rules.min_loss_scale
                and 1 in (rules.hysteresis, expected.hysteresis)
            )
            scaler.update(overflow=overflow)
            expected.update(overflow)
            seen = scaler.value, scaler.current.hysteresis
            assert seen == (expected.scale, expected.hysteresis), overflows[: number + 1]
            if number == 4 and scaler.value >= rules.min_loss_scale:
                saved, scaler = json.dumps(scaler.state_dict()), DynamicScaler(rules)
                scaler.load_state_dict(json.loads(saved))


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
