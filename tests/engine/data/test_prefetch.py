"""The thread that reads ahead: what it hands on, and how it ends."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from rayzero.engine.data.prefetch import Prefetch
from rayzero.engine.errors import EngineError

LIMIT_S = 60.0


def done_in_time(work: Callable[[], object]) -> bool:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return not thread.is_alive()


def test_items_in_their_order_and_then_what_the_source_raised():
    def source() -> Iterator[int]:
        yield from range(5)
        raise ValueError("no more")

    feed = Prefetch(source())
    assert [next(feed) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="no more"):
        next(feed)
    with pytest.raises(StopIteration):
        next(feed)
    assert not feed._thread.is_alive()


def test_it_is_ahead_by_its_depth_and_no_further():
    made = count()
    full = threading.Event()

    def source() -> Iterator[int]:
        for number in made:
            if number == 2:
                full.set()
            yield number

    feed = Prefetch(source(), depth=3)
    assert full.wait(LIMIT_S)
    assert next(feed) == 0
    feed.close()
    assert next(made) <= 4


def test_close_ends_the_thread_s_wait_at_once():
    feed = Prefetch(count())
    assert next(feed) == 0
    assert done_in_time(feed.close)
    assert not feed._thread.is_alive()
    with pytest.raises(EngineError, match="was closed"):
        next(feed)


def test_it_ends_when_nobody_has_it_any_more():
    feed = Prefetch(count())
    thread = feed._thread
    del feed
    gc.collect()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
