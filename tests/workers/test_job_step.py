from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.recut import GroupSurvival
from rayzero.engine.session import OTHER_LOADER
from rayzero.workers.job_engines import JobEngines
from rayzero.workers.job_step import JobStep

LOADER, ANOTHER = object(), object()


def follow(engines: str) -> JobStep:
    step = JobStep()
    step.engines += engines
    return step


@given(st.lists(st.sampled_from("abc"), max_size=60))
def test_steps_end_when_each_engine_has_stepped_since_the_last_end(calls: list[str]) -> None:
    step, seen = follow("abc"), set[str]()
    for engine in calls:
        seen.add(engine)
        assert step.completes(engine) == (len(seen) == 3)
        assert step.count(engine, lost=False) == (len(seen) == 3)
        if len(seen) == 3:
            seen.clear()


def test_one_engine_begins_where_it_has_no_gradients() -> None:
    step = follow("a")
    for within in (True, False):
        assert step.begins(LOADER, within=within)
        assert step.begins(OTHER_LOADER, within=within) == (not within)
        assert step.begins(None, within=within) == (not within)
    assert not step.begins_in_forward


def test_several_begin_once_a_step_with_a_forward_or_a_read() -> None:
    step = follow("ab")
    for place in (None, LOADER, OTHER_LOADER):
        assert step.begins(place, within=True)  # gradients that the last step has left
        assert step.begins_in_forward == (place is None)
        assert [step.begins(it, within=False) for it in (None, OTHER_LOADER, ANOTHER)] == [
            False
        ] * 3
        assert step.begins(LOADER, within=True) == (place is LOADER)  # the loop's next turn
        for engine in "ab":
            step.count(engine, lost=False)


def test_a_loop_that_counts_finished_steps_is_astray_where_these_are_lost() -> None:
    step = follow("ab")
    for engine in "aaab":
        assert step.count(engine, lost=False) == (engine == "b")
    for _ in range(3):
        assert not step.count("a", lost=True)
        assert not step.is_astray
    assert not step.count("a", lost=True)
    assert step.is_astray
    assert step.count("b", lost=True)  # it was none
    assert not step.is_astray


def test_idle_engines_are_told_less_and_less_often() -> None:
    step, told = follow("ab"), []
    for number in range(1, 1000):
        step.count("a", lost=False)
        if step.waits_for() == ["b"]:
            told.append(number)
    assert told == [100, 200, 400, 800]


@pytest.mark.parametrize(
    ("engines", "ahead", "continues"), [(2, False, True), (2, True, False), (1, True, True)]
)
def test_several_engines_do_not_continue_a_loop_that_has_read_ahead(
    engines: int, ahead: bool, continues: bool
) -> None:
    step: Any = SimpleNamespace(
        micro_batches=SimpleNamespace(is_read_where_steps_begin=ahead, can_read_again=True),
        runtime=SimpleNamespace(collectives=SimpleNamespace(on_broken=print)),
        reforming=SimpleNamespace(gathered_between_steps=False),
    )
    survival, job = GroupSurvival(step, Any, print), JobEngines()
    job._engines |= {str(n): SimpleNamespace(survival=survival) for n in range(engines)}
    job.enable(print)
    assert job.can_continue(replays_epochs=True) == continues
