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
    full, feed = threading.Event(), None

    def source() -> Iterator[int]:
        for number in made:
            if number == 3:
                full.set()  # one is on its way in
            yield number

    feed = Prefetch(source(), depth=3)
    assert full.wait(LIMIT_S)
    assert next(feed) == 0
    feed.close()
    assert next(made) <= 5


def test_every_wait_ends_by_being_told(monkeypatch: pytest.MonkeyPatch):
    """A repair waits for this thread: looking now and then would cost it tenths of a second."""
    limits: list[float | None] = []
    waiting, wait = threading.Event(), threading.Condition.wait

    def noted(self: threading.Condition, timeout: float | None = None) -> bool:
        if threading.current_thread().name == "rayzero-prefetch":
            limits.append(timeout)
            waiting.set()
        return wait(self, timeout)

    monkeypatch.setattr(threading.Condition, "wait", noted)
    feed = Prefetch(count())
    assert waiting.wait(LIMIT_S)  # there is no room
    feed.close()
    assert not feed._thread.is_alive()
    assert limits == [None]


def test_who_waits_for_an_item_is_told_of_the_end():
    go_on, asked = threading.Event(), threading.Event()

    def source() -> Iterator[int]:
        asked.set()
        go_on.wait(LIMIT_S)
        yield 1

    feed = Prefetch(source())
    errors: list[BaseException] = []

    def consume() -> None:
        try:
            next(feed)
        except EngineError as error:
            errors.append(error)

    def close() -> None:
        assert asked.wait(LIMIT_S)
        feed._queue.close()

    consumer = threading.Thread(target=consume, daemon=True)
    consumer.start()
    assert done_in_time(close)
    consumer.join(LIMIT_S)
    go_on.set()
    assert "was closed" in str(errors[0])
    feed.close()


def test_it_ends_when_nobody_has_it_any_more():
    feed = Prefetch(count())
    thread = feed._thread
    del feed
    gc.collect()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_the_garbage_collector_may_close_it_in_the_middle_of_a_hand_over():
    feed = Prefetch(count())

    def collected_inside() -> None:
        with feed._queue._changed:
            feed._queue.close()

    assert done_in_time(collected_inside)
    feed.close()
