"""Prints the private memory that a stream of a file takes, in bytes above that before it:

python -m tests.engine.data.streams.measure_memory FILE CACHE_BYTES
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pyarrow as pa

import rayzero.data
from rayzero.engine.data.sampling import StepSplit, assign_step
from tests.engine.data.streams.memory import make_source

BATCH = 64
INTERVAL_S = 0.005


def private_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(it.split()[1]) << 10 for it in lines if it.startswith("Private_Dirty:"))


def main(path: str, cache_bytes: int, threads: int = 4) -> int:
    source = rayzero.data.blocks(path)
    reader = make_source(rayzero.data.stream(source, 4, cache_bytes, threads=threads), BATCH)
    source.read(0).slice(0, 1).to_pylist()  # loads libraries
    pa.default_memory_pool().release_unused()
    before = private_bytes()
    most = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(INTERVAL_S):
            most = max(most, private_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    part = assign_step(BATCH, 1, 0, BATCH)[0]
    reader.begin(0, StepSplit((part,)), lambda: None)
    for cursor in range(0, int(source.counts.sum()), BATCH):
        reader.read(cursor, part, is_last=True, check=lambda: None)
    done.set()
    watcher.join()
    return most - before


if __name__ == "__main__":
    print(main(sys.argv[1], *map(int, sys.argv[2:])))
