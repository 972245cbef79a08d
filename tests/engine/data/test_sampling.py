"""Global order of samples, and their assignment to ranks and micro-steps, for any sizes."""

from __future__ import annotations

import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.data.sampling import (
    MicroBatch,
    SampleOrder,
    assign_step,
    count_micro_steps,
    samples_per_rank,
)
from rayzero.engine.errors import ConfigError, DataError


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
        ((0, 1, 0, 1), "train_batch_size of the job is 0"),
        ((8, 0, 0, 1), "world_size of the job is 0"),
        ((8, 2, 0, -1), "train_micro_batch_size_per_gpu of the job is -1"),
        ((8, 2, 2, 1), "rank 2 of 2"),
    ],
)
def test_invalid_sizes(sizes: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assign_step(*sizes)


LENGTHS = st.integers(1, 3000)
SEEDS = st.integers(-(2**70), 2**70)


@given(length=LENGTHS, seed=SEEDS, epoch=st.integers(0, 2**20))
def test_epoch_contains_every_sample_once(length: int, seed: int, epoch: int) -> None:
    order = SampleOrder(length, seed).indices(epoch * length, length)
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(length))


@pytest.mark.parametrize("length", [*range(1, 70), 255, 256, 257, 1023, 1024, 1025])
def test_bijection_at_the_edges_of_the_domain(length: int) -> None:
    order = SampleOrder(length, seed=3).indices(0, length)
    np.testing.assert_array_equal(np.sort(order), np.arange(length))


@given(length=LENGTHS, seed=SEEDS, start=st.integers(0, 10_000), count=st.integers(0, 500))
def test_windows_are_consistent(length: int, seed: int, start: int, count: int) -> None:
    order = SampleOrder(length, seed)
    window = order.indices(start, count)
    full = order.indices(0, start + count)
    np.testing.assert_array_equal(window, full[start:])
    if count:
        assert order.indices(start + count - 1, 1).item() == window[-1]


@given(length=st.integers(50, 3000), seed=SEEDS, epoch=st.integers(0, 1000))
def test_epochs_and_seeds_differ(length: int, seed: int, epoch: int) -> None:
    order = SampleOrder(length, seed)
    here = order.indices(epoch * length, length)
    assert not np.array_equal(here, order.indices((epoch + 1) * length, length))
    assert not np.array_equal(here, SampleOrder(length, seed + 1).indices(epoch * length, length))
    assert not np.array_equal(here, np.arange(length))


def test_order_is_stable_across_releases() -> None:
    """A job that resumes with a newer rayzero must not repeat samples: do not change the values."""
    values = SampleOrder(10, seed=0).indices(0, 20).tolist()
    assert "".join(map(str, values)) == "56042783198724961503"


def test_positions_are_uniform() -> None:
    length, epochs = 13, 6000
    order = SampleOrder(length, seed=7).indices(0, length * epochs).reshape(epochs, length)
    expected = epochs / length
    for place in range(length):
        counts = np.bincount(order[:, place], minlength=length)
        chi_squared = ((counts - expected) ** 2 / expected).sum()
        assert chi_squared < 40  # 12 degrees of freedom: p < 1e-4


def test_huge_dataset_needs_no_memory() -> None:
    length = 2**40
    tracemalloc.start()
    order = SampleOrder(length, seed=0)
    far = order.indices(5 * length - 500, 1000)  # across the end of an epoch
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1 << 20
    assert len(np.unique(far)) == 1000
    assert far.min() >= 0
    assert far.max() < length
    assert far.max() > 2**39


def test_empty_dataset_is_an_error() -> None:
    with pytest.raises(DataError, match="0 samples"):
        SampleOrder(0, seed=0)
