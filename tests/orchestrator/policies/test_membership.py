from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.orchestrator.policies.membership import (
    Candidate,
    NotEnough,
    Selected,
    WorkerLimits,
    not_enough_error,
    select_members,
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
        ("mmm", WorkerLimits(2, 3), [0, 1, 2], [], []),
        ("mmr", WorkerLimits(2, 4), [0, 1, 2], [], []),
        ("rmm", WorkerLimits(2, 2), [1, 2], [], [0]),  # warm ones first
        ("rmm", WorkerLimits(2, 2, 1), [1, 2], [], []),  # kept as a spare
        ("mmmm", WorkerLimits(1, 2), [0, 1], [], [2, 3]),
        ("mMm", WorkerLimits(2, 3), [0, 2], [1], []),
        ("mM", WorkerLimits(2, 3), [0, 1], [], []),  # nobody else is there
        ("mMr", WorkerLimits(2, 3), [0, 2], [1], []),
        ("MMM", WorkerLimits(2, 3), [0, 1], [2], []),
        ("MMr", WorkerLimits(1, 3), [2], [0, 1], []),
    ],
)
def test_who_takes_part(
    there: str, wanted: WorkerLimits, chosen: list[int], moved: list[int], surplus: list[int]
):
    members = select_members(some(there), wanted)
    assert isinstance(members, Selected)
    assert [one.index for one in members.members] == chosen
    assert [one.index for one in members.displaced] == moved
    assert [one.index for one in members.surplus] == surplus


def test_too_few_say_so():
    assert select_members(some("m"), WorkerLimits(2, 4)) == NotEnough(1)
    text = str(not_enough_error(NotEnough(1), WorkerLimits(2, 4), 300.0))
    assert "1 of at least 2 workers are left, and no replacement was ready within 300 s" in text
    assert "workers.start_timeout_s" in text


@given(st.text("mrMR", max_size=9), st.integers(1, 5), st.integers(0, 5), st.integers(0, 2))
def test_a_choice_is_within_bounds_and_stays(there: str, least: int, more: int, spares: int):
    wanted, candidates = WorkerLimits(least, least + more, spares), some(there)
    members = select_members(candidates, wanted)
    if len(there) < least:
        assert members == NotEnough(len(there))
        return
    assert isinstance(members, Selected)
    assert least <= len(members.members) <= wanted.max
    left = {one.index for one in (*members.displaced, *members.surplus)}
    assert not left & {one.index for one in members.members}
    now = {one.index for one in members.members}
    again = [
        Candidate(one.worker, one.worker.index in now, one.on_draining_node)
        for one in candidates
        if one.worker.index not in left
    ]
    settled = select_members(again, wanted)
    assert isinstance(settled, Selected)
    assert settled.members == members.members
