"""Assignment of a step's samples to ranks and micro-steps, for any sizes."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.data.sampling import (
    MicroBatch,
    assign_step,
    count_micro_steps,
    samples_per_rank,
)
from rayzero.engine.errors import ConfigError


@st.composite
def uneven_shares(draw: st.DrawFn) -> tuple[float, ...]:
    parts = draw(st.lists(st.floats(0, 1000), min_size=1, max_size=40).filter(lambda x: sum(x) > 1))
    return tuple(part / sum(parts) for part in parts)


@given(
    st.integers(1, 200),
    uneven_shares() | st.integers(1, 40).map(lambda ranks: (1 / ranks,) * ranks),
    st.integers(1, 30),
)
def test_samples_are_assigned_once_by_shares(
    global_batch: int, shares: tuple[float, ...], micro_batch: int
) -> None:
    ranks = len(shares)
    plans = [assign_step(global_batch, ranks, r, micro_batch, shares) for r in range(ranks)]
    owned = [m.start + k for plan in plans for m in plan for k in range(m.count)]
    assert owned == list(range(global_batch))  # contiguous, in rank order
    parts = [m for plan in plans for m in plan]
    assert sum(Fraction(m.count, global_batch) for m in parts) == 1
    assert all(m.weight == m.count / global_batch for m in parts)
    # A rank without samples borrows one, without weight.
    assert all(m.read_count == (m.count or 1) for m in parts)
    assert all(0 <= m.start <= m.start + m.read_count <= global_batch for m in parts)
    micro_steps = count_micro_steps(global_batch, ranks, micro_batch, shares)
    assert {len(plan) for plan in plans} == {micro_steps}
    counts = [sum(m.count for m in plan) for plan in plans]
    assert micro_steps == 1 or max(counts) > (micro_steps - 1) * micro_batch  # minimal
    for count, share, plan in zip(counts, shares, plans, strict=True):
        assert abs(count - share * global_batch) < 1 + 1e-9
        assert max(m.count for m in plan) <= micro_batch
        assert max(m.count for m in plan) - min(m.count for m in plan) <= 1
    if len({*shares}) == 1:  # the default
        assert max(counts) - min(counts) <= 1
        assert plans == [assign_step(global_batch, ranks, r, micro_batch) for r in range(ranks)]


def test_examples() -> None:
    assert assign_step(8, 2, 1, 4) == (MicroBatch(4, 4, 0.5),)
    assert assign_step(8, 3, 0, 2) == (MicroBatch(0, 2, 0.25), MicroBatch(2, 1, 0.125))
    assert assign_step(8, 3, 2, 2) == (MicroBatch(6, 1, 0.125), MicroBatch(7, 1, 0.125))
    assert assign_step(2, 3, 2, 4) == (MicroBatch(0, 0, 0.0),)
    # The largest share needs two micro-steps: ranks with one sample borrow for the second.
    assert [m.count == 0 for m in assign_step(4, 3, 1, 1)] == [False, True]


def test_remaining_samples_go_to_the_largest_remainders() -> None:
    assert samples_per_rank(10, 3, (0.5, 0.25, 0.25)) == (5, 3, 2)  # a tie goes to the first
    assert samples_per_rank(10, 3, (0.44, 0.28, 0.28)) == (4, 3, 3)
    assert samples_per_rank(10, 2, (1.0, 0.0)) == (10, 0)
    assert [m.count == 0 for m in assign_step(10, 2, 1, 5, (1.0, 0.0))] == [True, True]


@pytest.mark.parametrize("shares", [(1.0,), (0.5, 0.4), (1.5, -0.5), (0.5, float("nan"))])
def test_invalid_shares(shares: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match=r"the shares .* of 2 ranks"):
        samples_per_rank(8, 2, shares)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1, 0, 1), "the global batch is 0"),
        ((8, 0, 0, 1), "the world size is 0"),
        ((8, 2, 0, -1), "the micro-batch is -1"),
        ((8, 2, 2, 1), "rank 2 of 2"),
    ],
)
def test_invalid_sizes(sizes: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assign_step(*sizes)
