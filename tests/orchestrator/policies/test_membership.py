from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.orchestrator.policies.membership import (
    Selected,
    WorkerLimits,
    not_enough_error,
    select_members,
)
from rayzero.workers.messages import WorkerInfo


def as_workers(kinds: str) -> list[WorkerInfo]:
    return [
        WorkerInfo(index, "draining" if kind.isupper() else "n", "host", "ip", index)
        for index, kind in enumerate(kinds)
    ]


def select(workers: str, limits: WorkerLimits) -> Selected | None:
    """`m` a member, `r` another ready worker; capitals: on a draining node."""
    members = {index for index, kind in enumerate(workers) if kind.lower() == "m"}
    return select_members(as_workers(workers), limits, members, {"draining"})


def indices(workers: Iterable[WorkerInfo]) -> list[int]:
    return [worker.index for worker in workers]


@pytest.mark.parametrize(
    ("workers", "limits", "members", "displaced", "surplus"),
    [
        ("mmm", WorkerLimits(2, 3), [0, 1, 2], [], []),
        ("mmr", WorkerLimits(2, 4), [0, 1, 2], [], []),
        ("rmm", WorkerLimits(2, 2), [1, 2], [], [0]),  # members first
        ("rmm", WorkerLimits(2, 2, 1), [1, 2], [], []),  # kept as a spare
        ("mmmm", WorkerLimits(1, 2), [0, 1], [], [2, 3]),
        ("mMm", WorkerLimits(2, 3), [0, 2], [1], []),
        ("mM", WorkerLimits(2, 3), [0, 1], [], []),  # no other workers
        ("mMr", WorkerLimits(2, 3), [0, 2], [1], []),
        ("MMM", WorkerLimits(2, 3), [0, 1], [2], []),
        ("MMr", WorkerLimits(1, 3), [2], [0, 1], []),
        # Of a step in 4 parts: 1, 2 or 4 ranks; another worker waits for the fourth.
        ("mmm", WorkerLimits(2, 4, parts=4), [0, 1], [], []),
        ("mmrr", WorkerLimits(2, 4, parts=4), [0, 1, 2, 3], [], []),
        ("mmrrr", WorkerLimits(2, 4, parts=4), [0, 1, 2, 3], [], [4]),
        ("mMmm", WorkerLimits(2, 4, parts=4), [0, 2], [1], []),
        ("mm", WorkerLimits(2, 2, parts=3), [0, 1], [], []),  # no number fits: the script says so
    ],
)
def test_selection(
    workers: str, limits: WorkerLimits, members: list[int], displaced: list[int], surplus: list[int]
):
    selection = select(workers, limits)
    assert indices(selection.members) == members
    assert indices(selection.displaced) == displaced
    assert indices(selection.surplus) == surplus


def test_too_few_workers():
    assert select("m", WorkerLimits(2, 4)) is None
    text = str(not_enough_error(1, WorkerLimits(2, 4), 300.0))
    assert "1 of at least 2 workers are left, and no replacement was ready within 300 s" in text
    assert "workers.start_timeout_s" in text


def test_ranks_that_do_not_divide_the_step_wait():
    limits = WorkerLimits(2, 3, parts=3)
    assert select("mm", limits) is None
    assert "2 of at least 3 workers are left" in str(not_enough_error(2, limits, 300.0))


@given(
    st.text("mrMR", max_size=9),
    st.integers(1, 5),
    st.integers(0, 5),
    st.integers(0, 2),
    st.integers(0, 12),
)
def test_selection_is_within_limits_and_stable(
    workers: str, min_workers: int, extra: int, spares: int, parts: int
):
    limits = WorkerLimits(min_workers, min_workers + extra, spares, parts)
    selection = select(workers, limits)
    if selection is None or len(workers) < min_workers:
        assert selection is None
        assert parts or len(workers) < min_workers
        return
    assert min_workers <= len(selection.members) <= limits.max
    released = {*indices(selection.displaced), *indices(selection.surplus)}
    assert not released & selection.indices
    ready = [worker for worker in as_workers(workers) if worker.index not in released]
    repeated = select_members(ready, limits, selection.indices, {"draining"})
    assert repeated.members == selection.members
