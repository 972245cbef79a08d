"""The fault language: valid and invalid faults, and random schedules."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.errors import ConfigError
from rayzero.workers.chaos.spec import (
    FAULT_KINDS,
    PHASES,
    FaultSpec,
    all_fault_kinds,
    parse_fault,
    random_faults,
)

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "rank": st.integers(0, 999),
    "worker": st.integers(0, 999),
    "role": st.from_regex(r"[a-z][a-z0-9-]{0,31}", fullmatch=True),
    "node": st.integers(0, 99),
    "step": st.integers(1, 10**6),
    "steps": st.integers(1, 100),
    "times": st.integers(1, 9),
    "seconds": st.floats(0.001, 1e6),
    "phase": st.sampled_from(PHASES),
    "how": st.sampled_from(["flip", "cut", "remove"]),
}


@st.composite
def faults(draw: st.DrawFn) -> FaultSpec:
    name, kind = draw(st.sampled_from(all_fault_kinds()))
    optional = draw(st.sets(st.sampled_from([*kind.defaults]))) if kind.defaults else set()
    given = {key: draw(VALUES[key]) for key in {*kind.required, *optional}}
    return FaultSpec(name, **{**kind.defaults, **given})


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("stop(rank=0, step=2)", FaultSpec("stop", rank=0, step=2, phase="forward")),
        (
            " slow(rank=1, step=5, seconds=2, steps=3)\n",
            FaultSpec("slow", rank=1, step=5, seconds=2.0, steps=3, phase="forward"),
        ),
        (
            "raise_error(step=7, rank=1, phase='update', times=2)",
            FaultSpec("raise_error", rank=1, step=7, phase="update", times=2),
        ),
        ("kill(role='rollout', worker=1, step=7)", FaultSpec("kill", 7, role="rollout", worker=1)),
        ('tear_file(step=50, rank=0, how="cut")', FaultSpec("tear_file", step=50, how="cut")),
    ],
)
def test_valid_faults(text: str, fault: FaultSpec) -> None:
    assert parse_fault(text) == fault


@given(faults())
def test_canonical_text_parses_to_same_fault(fault: FaultSpec) -> None:
    assert parse_fault(str(fault)) == fault


def test_canonical_text_omits_defaults() -> None:
    assert str(parse_fault("kill(step=7, rank=1, phase='forward')")) == "kill(rank=1, step=7)"
    assert (
        str(parse_fault("kill(step=7, rank=1, phase='data')"))
        == 'kill(rank=1, step=7, phase="data")'
    )


def test_missing_step_is_set_if_required() -> None:
    assert parse_fault("kill(rank=1)", step=5).step == 5
    assert parse_fault("kill(rank=1, step=7)", step=5).step == 7
    assert parse_fault("slow_store(seconds=1)", step=5).step == 1


def test_targets_and_total_firings() -> None:
    assert parse_fault("kill(rank=1, step=7)").target == "worker"
    assert parse_fault("stop(role='rollout', worker=1, step=7)").target == "role"
    assert parse_fault("kill_vault(node=1, step=7)").target == "vault"
    assert parse_fault("drop_node(node=1, step=7)").target == "cluster"
    assert parse_fault("full_disk(step=7, times=3)").target == "store"
    assert parse_fault("full_disk(step=7, times=3)").total_firings == 3
    assert parse_fault("slow(rank=1, step=7, seconds=1, steps=4)").total_firings == 4


@pytest.mark.parametrize(
    ("text", "seen", "allowed"),
    [
        ("kil(rank=1, step=7)", "unknown fault 'kil' (did you mean 'kill'?)", "one of kill, stop"),
        (
            "kill(rnak=1, step=7)",
            "kill has no argument 'rnak' (did you mean 'rank'?)",
            'kill(rank=, step=, phase="forward")',
        ),
        ("kill(rank=1)", "kill needs step=", "kill(rank=, step="),
        (
            "kill(rank=1, step=7, phase='reduec')",
            "phase='reduec' (did you mean 'reduce'?)",
            "one of data, forward,",
        ),
        ("kill(role='rollout', step=7)", "kill needs worker=", "kill(role=, worker=, step=)"),
        ("kill(role='a', rank=1, step=7)", "kill has no argument 'rank'", "kill(role=, worker="),
        ("kill(role=1, worker=1, step=7)", "role=1", "the name of a role"),
        ("hang(role='a', worker=1, step=7)", "hang has no argument 'role'", "hang(rank=, step="),
        ("kill(rank=-1, step=7)", "rank=-1", "a whole number, 0 or more"),
        ("kill(rank=1, step=0)", "step=0", "a whole number, 1 or more"),
        ("kill(rank=True, step=7)", "rank=True", "a whole number"),
        ("kill(rank=1.0, step=7)", "rank=1.0", "a whole number"),
        ("slow(rank=1, step=7, seconds=0)", "seconds=0", "a number of seconds above 0"),
        ("slow(rank=1, step=7, seconds=1e999)", "seconds=inf", "a number of seconds"),
        ("slow(rank=1, step=7, seconds='1')", "seconds='1'", "a number of seconds"),
        ("tear_file(step=1, rank=0, how=[])", "how=[]", "one of flip, cut, remove"),
        ("kill(1, 7)", "an argument without a name", "a call with keyword literals"),
        ("kill(**{'rank': 1})", "an argument without a name", "a call"),
        ("kill(rank=1, rank=2, step=3)", "argument 'rank' given twice", "a call"),
        ("kill(rank=open('x'), step=1)", "'rank' is not a literal", "a call"),
        ("kill(rank=x, step=1)", "'rank' is not a literal", "a call"),
        ("kill", "not a call", "a call"),
        ("os.kill(rank=1)", "not a call", "a call"),
        ("kill(rank=1", "not valid syntax", "a call"),
        ("kill(rank=1); stop(rank=1)", "not valid syntax", "a call"),
        ("", "not valid syntax", "a call"),
        ("\0", "not valid syntax", "a call"),
        ("kill(" * 60, "300 characters", "at most 200"),
    ],
)
def test_invalid_faults_are_explained(text: str, seen: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_fault(text)
    assert seen in caught.value.seen
    assert allowed in caught.value.allowed
    assert caught.value.fix


@given(
    st.text(st.characters(max_codepoint=255), max_size=60)
    | st.text("kilstop(rank=1,)[]{}'\"-*", max_size=60)
)
def test_any_text_parses_or_raises_config_error(text: str) -> None:
    with suppress(ConfigError):
        parse_fault(text)


def test_random_schedule_is_determined_by_its_seed() -> None:
    first = random_faults(3, 20, 4, 100, [*FAULT_KINDS])
    assert first == random_faults(3, 20, 4, 100, [*FAULT_KINDS])
    assert first != random_faults(4, 20, 4, 100, [*FAULT_KINDS])


@given(
    seed=st.integers(),
    count=st.integers(0, 60),
    ranks=st.integers(1, 9),
    steps=st.integers(2, 200),
    kinds=st.lists(st.sampled_from([*FAULT_KINDS]), min_size=1, max_size=4),
)
def test_schedule_is_valid_and_spread_over_steps(
    seed: int, count: int, ranks: int, steps: int, kinds: list[str]
) -> None:
    schedule = random_faults(seed, count, ranks, steps, kinds)
    assert len(schedule) == count
    for fault in schedule:
        assert fault.kind in kinds
        assert parse_fault(str(fault)) == fault
        assert fault.rank < ranks
        assert fault.step <= steps
    drawn = [fault.step for fault in schedule if "step" in FAULT_KINDS[fault.kind].required]
    assert drawn == sorted(drawn)
    assert all(step >= 2 for step in drawn)
    if len(drawn) == count and steps - 1 >= 2 * count:
        halves = [step <= 1 + (steps + 1) // 2 for step in drawn]
        assert abs(2 * sum(halves) - count) <= 2


def test_impossible_schedules_are_rejected() -> None:
    with pytest.raises(ConfigError, match="did you mean 'kill'"):
        random_faults(0, 1, 2, 10, ["killl"])
    with pytest.raises(ConfigError, match="faults in 1 steps"):
        random_faults(0, 1, 2, 1)


def test_faults_are_imported_without_torch_and_ray() -> None:
    script = (
        "import sys, rayzero.workers.chaos.spec, rayzero.workers.chaos.inject\n"
        "sys.exit(bool({'torch', 'ray'} & {*sys.modules}))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
