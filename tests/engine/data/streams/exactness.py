"""Reads a stream through random faults and resizes, and compares it with a plain reader."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rayzero.engine.data.sample_ledger import SampleLedger, check_ledger
from rayzero.engine.data.streams.source import BlockStream
from tests.engine.data.streams.memory import make_source, read_step

WORLDS = (1, 2, 3, 5)


def check_through_faults(
    stream: BlockStream, plain: Sequence[Any], folder: Path, faults: int, batch: int = 7
) -> None:
    """Each fault, or resize, undoes up to two steps; after every second one, on average, nothing
    of the former generation is left in memory.

    Args:
        plain: the samples by their numbers, from another reader.
        folder: of the ledger.
    """
    rng = random.Random(faults)
    numbers = {_key(it): number for number, it in enumerate(plain)}
    assert len(numbers) == len(plain)
    order = stream.order(3, batch)
    source = make_source(stream, batch, 3)
    step = 0
    for generation in range(faults + 1):
        world = rng.choice(WORLDS)
        if rng.random() < 0.5:
            source = make_source(stream, batch, 3)
        ledgers = [SampleLedger(folder, generation, rank, world) for rank in range(world)]
        for _ in range(rng.randint(1, 4)):
            samples = read_step(source, step * batch, batch, 2, world)
            found = [numbers[_key(it)] for it in samples]
            assert found == order.indices(step * batch, batch).tolist()
            step += 1
            for rank, ledger in enumerate(ledgers):
                ledger.add_samples(found[rank::world])
                ledger.write_step(step)
        step -= rng.randint(0, min(2, step - 1))
    assert check_ledger(folder, order, batch, step) == []
    if stream.mixture is None:
        seen = Counter(order.indices(0, len(plain)).tolist())
        assert step * batch > 2 * len(plain)
        assert seen == dict.fromkeys(range(len(plain)), 1)


def _key(sample: Any) -> str:
    return repr(sorted(sample.items()))
