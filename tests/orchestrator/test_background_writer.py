"""The background writer: failures, hanging disks, bounds, and shutdown."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.orchestrator.background_writer import BackgroundWriter
from rayzero.workers import bounded_queue


@pytest.mark.parametrize(
    "failure", [StoreError("full", "disk", "No space left on device"), ValueError("odd")]
)
def test_failed_write_is_reported_once_and_retried(
    failure: Exception,
):
    warnings: list[str] = []
    written: list[str] = []
    failures = iter([True, True, True])
    done = threading.Event()

    def write(lines: Sequence[str]) -> None:
        if next(failures, False):
            raise failure
        written.extend(lines)
        done.set()

    writer = BackgroundWriter(warnings.append, retry_delays_s=(0.01,))
    queue = writer.add_queue("the journal", write, 0.01)
    queue.put("a")
    queue.put("b")
    assert done.wait(10)
    assert writer.close(5)
    assert written == ["a", "b"]
    assert len(warnings) == 1
    assert "the journal cannot be written" in warnings[0]


def wait_until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.01)


def test_hanging_write_does_not_block_put_or_close():
    release = threading.Event()
    writer = BackgroundWriter(lambda _: None)
    queue = writer.add_queue("the log", lambda _: release.wait(10) and None, 0.0)
    queue.put("a")
    start_s = time.monotonic()
    queue.put("b")
    assert not writer.close(0.2)
    assert time.monotonic() - start_s < 5
    assert not queue.is_empty
    release.set()


def test_flush_writes_at_once_and_gives_up_in_time():
    written: list[str] = []
    release = threading.Event()
    writer = BackgroundWriter(lambda _: None)
    quick = writer.add_queue("the journal", written.extend, 60.0)
    quick.put("a")
    assert quick.flush(10)
    assert written == ["a"]
    assert quick.flush(0), "all of it is written"
    hanging = writer.add_queue("the log", lambda _: release.wait(10) and None, 60.0)
    hanging.put("b")
    assert not hanging.flush(0.05)
    release.set()
    assert hanging.flush(10)
    assert writer.close(10)


def test_failing_queue_does_not_delay_others():
    written: list[str] = []

    def fail(lines: Sequence[str]) -> None:
        raise OSError("full")

    writer = BackgroundWriter(lambda _: None, retry_delays_s=(60.0,))
    bad = writer.add_queue("bad", fail, 0.0)
    good = writer.add_queue("good", written.extend, 0.0)
    bad.put("x")
    good.put("a")
    wait_until(lambda: written)
    assert written == ["a"]
    assert not writer.close(0.5)
    assert good.is_empty
    assert not bad.is_empty


def test_items_beyond_bound_are_dropped_with_warning():
    release, written, warnings = threading.Event(), [], []

    def write(numbers: Sequence[int]) -> None:
        assert release.wait(10)
        written.extend(numbers)

    writer = BackgroundWriter(warnings.append)
    queue = writer.add_queue("the metrics files", write, 0.0, max_items=4)
    for number in range(1, 11):
        queue.put(number)
    release.set()
    assert writer.close(10)
    assert written[-4:] == [7, 8, 9, 10]
    dropped = 10 - len(set(written))
    assert sum(int(text.split(": ")[1].split()[0]) for text in warnings) >= dropped


def test_items_are_bounded_by_bytes_and_written_early():
    written: list[str] = []
    writer = BackgroundWriter(lambda _: None)
    queue = writer.add_queue("the log", written.extend, 60.0)
    for number in range(100):
        queue.put(f"{number:0100000}")
        with queue.changed:  # the writer's thread takes items meanwhile
            assert sum(map(len, queue.items.since(0))) <= bounded_queue.MAX_BYTES
    wait_until(lambda: written)
    assert written, "before its interval has passed, because the queue is half full"
    assert writer.close(10)
