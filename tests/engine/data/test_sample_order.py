"""Global sample order: a uniform bijection per epoch, in constant memory."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.data.sampling import SampleOrder
from rayzero.engine.errors import DataError

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
