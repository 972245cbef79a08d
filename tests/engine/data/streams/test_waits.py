"""How fast a source has to be: steps are taken by the clock of what the source has delivered."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import rayzero.data
from rayzero.engine.data.sampling import assign_step
from rayzero.engine.data.streams import cache
from rayzero.engine.data.streams.source import StreamSource
from tests.engine.data.streams.memory import MemorySource, make_source

BATCH = 16
ROWS = 32  # of a block
FIRST_STEPS = 4  # have rows of every source; the first window of each has to be waited for


class Deliveries:
    """Lets blocks be read one by one, and waits until one is in the cache."""

    def __init__(self) -> None:
        self.waiting = 0  # reads that have begun, and are not delivered yet
        self._permits = threading.Semaphore(0)
        self._lock = threading.Lock()

    def before_read(self, block: int) -> None:
        with self._lock:
            self.waiting += 1
        assert self._permits.acquire(timeout=60)

    def deliver(self, source: StreamSource) -> None:
        """One block arrives, if one is being read: until then the source has nothing to do."""
        if not self.waiting:
            return
        blocks = source.cache
        before = blocks.counters.reads
        with self._lock:
            self.waiting -= 1
        self._permits.release()
        with blocks._changed:

            def is_done() -> bool:  # also the next reads have begun
                return blocks.counters.reads > before and len(blocks._reading) == self.waiting

            while not is_done():
                blocks._changed.wait(0.01)


def count_waits(parts: dict[str, Any], deliveries: Deliveries, speed: float) -> int:
    """The blocks that steps had to wait for, but for the first steps, from sources that deliver
    `speed` times what the steps need, together."""
    described = rayzero.data.mix(parts, threads=2) if len(parts) > 1 else parts["source 0"][0]
    source = make_source(described, BATCH)
    part = assign_step(BATCH, 1, 0, BATCH)[0]
    waits = 0

    def wait() -> None:
        nonlocal waits
        waits += 1
        deliveries.deliver(source)

    source.begin(0, (part,), wait)  # type: ignore[arg-type]
    source.read(0, part, is_last=True, check=wait)
    credit = 0.0
    for step in range(1, 5 * 8 * ROWS // BATCH):
        credit += speed * BATCH / ROWS
        while credit >= 1:
            deliveries.deliver(source)
            credit -= 1
        source.read(step * BATCH, part, is_last=True, check=wait)
        if step == FIRST_STEPS:
            waits = 0
    while deliveries.waiting:  # or its threads would not end
        source.cache.close()
        deliveries.deliver(source)
    return waits


@pytest.mark.parametrize("weights", [(1.0,), (0.5, 0.5), (0.8, 0.2), (0.8, 0.05, 0.05, 0.05, 0.05)])
def test_no_step_waits_for_a_source_twice_as_fast(
    weights: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "CHECK_INTERVAL_S", 0.01)

    def waits(speed: float) -> int:
        deliveries = Deliveries()
        parts = {}
        for number, weight in enumerate(weights):
            name = f"source {number}"
            memory = MemorySource([ROWS] * 64, name)
            memory.before_read = deliveries.before_read
            parts[name] = (rayzero.data.stream(memory, 8, threads=2), weight)
        return count_waits(parts, deliveries, speed)

    assert waits(2.0) == 0
    assert waits(0.5) > 0
