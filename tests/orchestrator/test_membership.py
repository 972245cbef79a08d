from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.orchestrator.policies.membership import (
    Candidate,
    Members,
    Short,
    Wanted,
    choose,
    too_few,
)
from rayzero.workers.messages import WorkerInfo


def some(text: str) -> list[Candidate]:
    """`m` a member, `r` somebody who is ready; capitals: on a leaving node."""
    return [
        Candidate(WorkerInfo(index, "n", "host", "ip", index), one.lower() == "m", one.isupper())
        for index, one in enumerate(text)
    ]


@pytest.mark.parametrize(
    ("there", "wanted", "chosen", "moved", "surplus"),
    [
        ("mmm", Wanted(2, 3), [0, 1, 2], [], []),
        ("mmr", Wanted(2, 4), [0, 1, 2], [], []),
        ("rmm", Wanted(2, 2), [1, 2], [], [0]),  # warm ones first
        ("rmm", Wanted(2, 2, 1), [1, 2], [], []),  # kept as a spare
        ("mmmm", Wanted(1, 2), [0, 1], [], [2, 3]),
        ("mMm", Wanted(2, 3), [0, 2], [1], []),
        ("mM", Wanted(2, 3), [0, 1], [], []),  # nobody else is there
        ("mMr", Wanted(2, 3), [0, 2], [1], []),
        ("MMM", Wanted(2, 3), [0, 1], [2], []),
        ("MMr", Wanted(1, 3), [2], [0, 1], []),
    ],
)
def test_who_takes_part(
    there: str, wanted: Wanted, chosen: list[int], moved: list[int], surplus: list[int]
):
    members = choose(some(there), wanted)
    assert isinstance(members, Members)
    assert [one.index for one in members.chosen] == chosen
    assert [one.index for one in members.moved] == moved
    assert [one.index for one in members.surplus] == surplus


def test_too_few_say_so():
    assert choose(some("m"), Wanted(2, 4)) == Short(1)
    text = str(too_few(Short(1), Wanted(2, 4), 300.0))
    assert "1 of at least 2 workers are left, and no replacement was ready within 300 s" in text
    assert "workers.start_timeout_s" in text


@given(st.text("mrMR", max_size=9), st.integers(1, 5), st.integers(0, 5), st.integers(0, 2))
def test_a_choice_is_within_bounds_and_stays(there: str, least: int, more: int, spares: int):
    wanted, candidates = Wanted(least, least + more, spares), some(there)
    members = choose(candidates, wanted)
    if len(there) < least:
        assert members == Short(len(there))
        return
    assert isinstance(members, Members)
    assert least <= len(members.chosen) <= wanted.most
    left = {one.index for one in (*members.moved, *members.surplus)}
    assert not left & {one.index for one in members.chosen}
    now = {one.index for one in members.chosen}
    again = [
        Candidate(one.worker, one.worker.index in now, one.leaving)
        for one in candidates
        if one.worker.index not in left
    ]
    settled = choose(again, wanted)
    assert isinstance(settled, Members)
    assert settled.chosen == members.chosen
