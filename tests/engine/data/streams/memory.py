"""Sources in memory, whose rows are known; loaders over streams of them on any rank."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rayzero.engine.data.loader import StepLoader
from rayzero.engine.data.micro_batches import MicroBatches
from rayzero.engine.data.sampling import StepSplit, TrainingProgress, assign_step
from rayzero.engine.data.streams.source import BlockStream, StreamSource


class MemorySource:
    """Row i of all has the values i and "name-i"."""

    def __init__(self, counts: Sequence[int], name: str = "memory", width: int = 0) -> None:
        self.name = name
        self.counts = np.array(counts, dtype=np.int64)
        self.fingerprint = f"{name} {counts}"
        self.reads: Counter[int] = Counter()
        self.before_read: Callable[[int], None] = lambda block: None
        self._width = width
        self._lock = threading.Lock()

    def read(self, block: int) -> pa.Table:
        with self._lock:
            self.reads[block] += 1
        self.before_read(block)
        first = int(self.counts[:block].sum())
        rows = range(first, first + int(self.counts[block]))
        texts = [f"{self.name}-{row}" + "x" * self._width for row in rows]
        return pa.table({"row": list(rows), "text": texts})

    def describe(self, block: int) -> str:
        return f"memory block {block}"


def make_source(
    stream: BlockStream, batch: int, seed: int = 0, cursor: int = 0, register: Any = None
) -> StreamSource:
    progress = TrainingProgress(sample_cursor=cursor, global_batch=batch)
    return StreamSource(stream, seed, progress, register or (lambda *_: None))


def read_step(
    source: StreamSource, cursor: int, batch: int, micro_batch: int, world: int
) -> list[dict[str, Any]]:
    """The samples of one step, of all ranks, by the loader of each."""
    samples = []
    for rank in range(world):
        progress = TrainingProgress(sample_cursor=cursor, global_batch=batch)
        own = MicroBatches(progress, StepSplit(assign_step(batch, world, rank, micro_batch)))
        loader = StepLoader(source, own, collate_fn=list)
        for part, read in zip(own.split, loader.steps(1), strict=True):
            samples += read[: part.count]
    return samples
