"""Prefetch thread: items, errors, bounds, shutdown."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count

import pytest

from rayzero.engine.data.prefetch import Prefetch

LIMIT_S = 60.0


def test_items_in_order_then_the_error_of_the_source():
    def source() -> Iterator[int]:
        yield from range(5)
        raise ValueError("no more")

    prefetch = Prefetch(source())
    assert [next(prefetch) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="no more"):
        next(prefetch)
    with pytest.raises(StopIteration):
        next(prefetch)
    assert not prefetch._thread.is_alive()


def test_prefetch_is_bounded_by_its_depth():
    numbers = count()
    full = threading.Event()

    def source() -> Iterator[int]:
        for number in numbers:
            if number == 2:
                full.set()
            yield number

    prefetch = Prefetch(source(), depth=3)
    assert full.wait(LIMIT_S)
    assert next(prefetch) == 0
    prefetch.close()
    assert next(numbers) <= 4
