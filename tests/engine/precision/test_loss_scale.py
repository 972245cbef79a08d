"""The loss scale's rules, against tables worked out by hand from DeepSpeed's DynamicLossScaler."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.precision.loss_scale import (
    DynamicScaler,
    DynamicScaleRules,
    FixedScaler,
    LossScaleState,
)

# A row: rules, then what each step was ("." good, "x" overflow), and the scale after each.
TABLE = [
    # The first rise takes window + 1 good steps, the following ones window each.
    (DynamicScaleRules(16, 2, 1), ".....", [16, 16, 32, 32, 64]),
    (DynamicScaleRules(16, 1, 1), "....", [16, 32, 64, 128]),
    # An overflow begins the count anew; without hysteresis it lowers at once.
    (DynamicScaleRules(16, 2, 1), "..x...x", [16, 16, 8, 8, 8, 16, 8]),
    # Hysteresis 2: the first overflow is free, the second lowers, and so does every one after it,
    # good steps between them or not, until the scale has risen.
    (DynamicScaleRules(16, 2, 2), "x.x.x", [16, 16, 8, 8, 4]),
    (DynamicScaleRules(16, 2, 2), "xx...xx", [16, 8, 8, 8, 16, 16, 8]),
    # A rise that comes due without an overflow before it leaves the hysteresis full.
    (DynamicScaleRules(16, 2, 3), "...xxx", [16, 16, 32, 32, 32, 16]),
    # Consecutive: any good step gives the hysteresis back.
    (DynamicScaleRules(16, 2, 2, consecutive=True), "x.x.xx", [16, 16, 16, 16, 16, 8]),
    (DynamicScaleRules(16, 9, 2, consecutive=True), "xx.x", [16, 8, 8, 8]),
    # The minimum holds, also where the start was below it.
    (DynamicScaleRules(4, 5, 1, minimum=3), "x", [3]),
    (DynamicScaleRules(2, 5, 1, minimum=8), "x.", [8, 8]),
]


@pytest.mark.parametrize(("rules", "steps", "scales"), TABLE)
def test_the_table(rules: DynamicScaleRules, steps: str, scales: list[float]) -> None:
    scaler, seen = DynamicScaler(rules), []
    for step in steps:
        scaler.update(overflow=step == "x")
        seen.append(scaler.value)
    assert seen == scales


@dataclass
class Counted:
    """The same rules as DeepSpeed keeps them: by the numbers of steps, not by a count."""

    rules: DynamicScaleRules

    def __post_init__(self) -> None:
        self.step, self.last, self.left = 0, -1, self.rules.hysteresis
        self.scale = float(self.rules.initial)

    def after(self, overflow: bool) -> None:
        if overflow:
            if 1 in (self.rules.hysteresis, self.left):
                self.scale = max(self.scale / 2, self.rules.minimum)
            else:
                self.left -= 1
            self.last = self.step
        else:
            if self.rules.consecutive:
                self.left = self.rules.hysteresis
            between = self.step - self.last - 1
            if between > 0 and between % self.rules.window == 0:
                if not self.rules.consecutive:
                    self.left = self.rules.hysteresis
                self.scale *= 2
        self.step += 1


RULES = st.builds(
    DynamicScaleRules,
    initial=st.integers(0, 30).map(lambda power: 2.0**power),
    window=st.integers(1, 6),
    hysteresis=st.integers(1, 4),
    consecutive=st.booleans(),
    minimum=st.sampled_from([0.25, 1, 2, 64]),
)


@given(RULES, st.lists(st.booleans(), max_size=60))
def test_equals_a_record_of_step_numbers(rules: DynamicScaleRules, steps: list[bool]) -> None:
    ours, right = DynamicScaler(rules), Counted(rules)
    for overflow in steps:
        assert ours.cannot_decrease == (
            right.scale == rules.minimum and 1 in (rules.hysteresis, right.left)
        )
        ours.update(overflow=overflow)
        right.after(overflow)
        assert (ours.value, ours.current.hysteresis) == (right.scale, right.left)


@given(RULES, st.lists(st.booleans(), max_size=60))
def test_invariants(rules: DynamicScaleRules, steps: list[bool]) -> None:
    now = rules.initial_state()
    for overflow in steps:
        then = rules.next_state(now, overflow=overflow)
        assert 1 <= then.hysteresis <= rules.hysteresis
        assert then.value >= min(rules.minimum, rules.initial)
        assert then.good_steps == (0 if overflow else now.good_steps + 1)
        if overflow:
            assert then.value <= max(now.value, rules.minimum)
        else:
            assert then.value in (now.value, 2 * now.value)
        now = then


@given(RULES, st.lists(st.booleans(), max_size=20), st.lists(st.booleans(), max_size=20))
def test_goes_on_from_its_json(
    rules: DynamicScaleRules, before: list[bool], after: list[bool]
) -> None:
    first, second = DynamicScaler(rules), DynamicScaler(rules)
    for overflow in before:
        first.update(overflow=overflow)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for overflow in after:
        first.update(overflow=overflow)
        second.update(overflow=overflow)
    if first.value >= rules.minimum:  # a start below the minimum is lifted by a load
        assert first.current == second.current


def test_a_state_of_other_rules_is_fitted() -> None:
    scaler = DynamicScaler(DynamicScaleRules(16, 2, hysteresis=1, minimum=4))
    scaler.load_state_dict({"value": 1.0, "hysteresis": 3, "good_steps": 7})
    assert scaler.current == LossScaleState(4.0, 1, 7)
    scaler.load_state_dict(None)  # of a run without a scale
    assert scaler.current == LossScaleState(4.0, 1, 7)


def test_a_fixed_scale_never_moves() -> None:
    scaler = FixedScaler(128.0)
    scaler.load_state_dict({"value": 2.0, "hysteresis": 1, "good_steps": 0})
    for overflow in (True, False):
        scaler.update(overflow=overflow)
    assert (scaler.value, scaler.cannot_decrease, scaler.state_dict()) == (128.0, False, None)
