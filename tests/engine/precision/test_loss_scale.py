"""The loss scale's rules, against tables worked out by hand from DeepSpeed's DynamicLossScaler."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.precision.loss_scale import DynamicRules, DynamicScale, FixedScale, LossScale

# A row: rules, then what each step was ("." good, "x" overflow), and the scale after each.
TABLE = [
    # The first rise takes window + 1 good steps, the following ones window each.
    (DynamicRules(16, 2, 1), ".....", [16, 16, 32, 32, 64]),
    (DynamicRules(16, 1, 1), "....", [16, 32, 64, 128]),
    # An overflow begins the count anew; without hysteresis it lowers at once.
    (DynamicRules(16, 2, 1), "..x...x", [16, 16, 8, 8, 8, 16, 8]),
    # Hysteresis 2: the first overflow is free, the second lowers, and so does every one after it,
    # good steps between them or not, until the scale has risen.
    (DynamicRules(16, 2, 2), "x.x.x", [16, 16, 8, 8, 4]),
    (DynamicRules(16, 2, 2), "xx...xx", [16, 8, 8, 8, 16, 16, 8]),
    # A rise that comes due without an overflow before it leaves the hysteresis full.
    (DynamicRules(16, 2, 3), "...xxx", [16, 16, 32, 32, 32, 16]),
    # Consecutive: any good step gives the hysteresis back.
    (DynamicRules(16, 2, 2, consecutive=True), "x.x.xx", [16, 16, 16, 16, 16, 8]),
    (DynamicRules(16, 9, 2, consecutive=True), "xx.x", [16, 8, 8, 8]),
    # The minimum holds, also where the start was below it.
    (DynamicRules(4, 5, 1, minimum=3), "x", [3]),
    (DynamicRules(2, 5, 1, minimum=8), "x.", [8, 8]),
]


@pytest.mark.parametrize(("rules", "steps", "scales"), TABLE)
def test_the_table(rules: DynamicRules, steps: str, scales: list[float]) -> None:
    scaler, seen = DynamicScale(rules), []
    for step in steps:
        scaler.after(overflow=step == "x")
        seen.append(scaler.value)
    assert seen == scales


@dataclass
class Counted:
    """The same rules as DeepSpeed keeps them: by the numbers of steps, not by a count."""

    rules: DynamicRules

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
    DynamicRules,
    initial=st.integers(0, 30).map(lambda power: 2.0**power),
    window=st.integers(1, 6),
    hysteresis=st.integers(1, 4),
    consecutive=st.booleans(),
    minimum=st.sampled_from([0.25, 1, 2, 64]),
)


@given(RULES, st.lists(st.booleans(), max_size=60))
def test_equals_a_record_of_step_numbers(rules: DynamicRules, steps: list[bool]) -> None:
    ours, right = DynamicScale(rules), Counted(rules)
    for overflow in steps:
        assert ours.exhausted == (
            right.scale == rules.minimum and 1 in (rules.hysteresis, right.left)
        )
        ours.after(overflow=overflow)
        right.after(overflow)
        assert (ours.value, ours.now.hysteresis) == (right.scale, right.left)


@given(RULES, st.lists(st.booleans(), max_size=60))
def test_invariants(rules: DynamicRules, steps: list[bool]) -> None:
    now = rules.start()
    for overflow in steps:
        then = rules.after(now, overflow=overflow)
        assert 1 <= then.hysteresis <= rules.hysteresis
        assert then.value >= min(rules.minimum, rules.initial)
        assert then.good_steps == (0 if overflow else now.good_steps + 1)
        if overflow:
            assert then.value <= max(now.value, rules.minimum)
        else:
            assert then.value in (now.value, 2 * now.value)
        now = then


@given(RULES, st.lists(st.booleans(), max_size=20), st.lists(st.booleans(), max_size=20))
def test_goes_on_from_its_json(rules: DynamicRules, before: list[bool], after: list[bool]) -> None:
    first, second = DynamicScale(rules), DynamicScale(rules)
    for overflow in before:
        first.after(overflow=overflow)
    second.load(json.loads(json.dumps(first.state())))
    for overflow in after:
        first.after(overflow=overflow)
        second.after(overflow=overflow)
    if first.value >= rules.minimum:  # a start below the minimum is lifted by a load
        assert first.now == second.now


def test_a_state_of_other_rules_is_fitted() -> None:
    scaler = DynamicScale(DynamicRules(16, 2, hysteresis=1, minimum=4))
    scaler.load({"value": 1.0, "hysteresis": 3, "good_steps": 7})
    assert scaler.now == LossScale(4.0, 1, 7)
    scaler.load(None)  # of a run without a scale
    assert scaler.now == LossScale(4.0, 1, 7)


def test_a_fixed_scale_never_moves() -> None:
    scaler = FixedScale(128.0)
    scaler.load({"value": 2.0, "hysteresis": 1, "good_steps": 0})
    for overflow in (True, False):
        scaler.after(overflow=overflow)
    assert (scaler.value, scaler.exhausted, scaler.state()) == (128.0, False, None)
