"""Rows of a stream a second, on two ranks, against a plain scan of the same files by pyarrow.

    python -m benchmarks.stream_throughput [--column fixed] [--cold] [--json FILE]

Two processes read, in turn: `scan` reads every second row group of all files, and nothing else;
`stream` is the path of a training job: the `StepLoader` of a rank over `rayzero.data.stream`, which
shuffles, copies the rows of each micro-batch and makes tensors. A row has 4 kB: 1,024 tokens, as
lists or bytes, or a text. Wall time is that of the slower process, processor time that of both: on
a machine that does other work, only the second one can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

import rayzero.data
from benchmarks.machine import describe_machine, format_machine
from rayzero.engine.data.loader import StepLoader
from rayzero.engine.data.micro_batches import MicroBatches
from rayzero.engine.data.sampling import StepSplit, TrainingProgress, assign_step
from rayzero.engine.data.streams.cache import READ_FACTOR
from rayzero.engine.data.streams.source import StreamSource

TOKENS = 1024
VOCABULARY = 50_000
COLUMNS = ("fixed", "list", "binary", "string")


@dataclass(frozen=True)
class Plan:
    """Configuration of a measurement."""

    turns: int
    column: str
    cold: bool
    files: int
    groups: int  # of a file
    rows: int  # of a row group
    batch: int
    micro_batch: int
    window: int
    threads: int  # that read blocks, of a rank
    ranks: int = 2

    @property
    def blocks(self) -> int:
        return self.files * self.groups

    @property
    def nbytes(self) -> int:
        return self.blocks * self.rows * TOKENS * 4


@dataclass(frozen=True)
class Turn:
    """One process's time, in seconds; of a stream also how often it read a block, and how long its
    training loop waited for data."""

    wall_s: float
    cpu_s: float
    rows: int
    reads: int = 0
    wait_s: float = 0.0


def write_files(folder: Path, plan: Plan) -> None:
    """Tokens by Zipf's law, as texts have them."""
    random = np.random.default_rng(0)
    kinds = {"fixed": pa.list_(pa.int32(), TOKENS), "list": pa.list_(pa.int32())}
    for number in range(plan.files):
        shape = (plan.groups * plan.rows, TOKENS)
        tokens = (random.zipf(1.2, shape) % VOCABULARY).astype(np.int32)
        flat = pa.array(tokens.reshape(-1))
        if plan.column == "binary":
            column = pa.array([row.tobytes() for row in tokens], pa.binary())
        elif plan.column == "string":
            column = pa.array([row[:512].tobytes().hex() for row in tokens])
        else:
            fixed = pa.FixedSizeListArray.from_arrays(flat, TOKENS)
            column = fixed.cast(kinds[plan.column])
        pq.write_table(
            pa.table({"tokens": column}), folder / f"{number:03}.parquet", row_group_size=plan.rows
        )


class Scan:
    """Every second row group, one after the other, in Arrow's usual pool."""

    def __init__(self, folder: Path, rank: int, plan: Plan) -> None:
        self._folder = folder
        self._rank = rank
        self._ranks = plan.ranks
        self._pool = pa.default_memory_pool()  # before a stream chooses another one

    def take_turn(self) -> Turn:
        chosen = pa.default_memory_pool()
        pa.set_memory_pool(self._pool)
        rows = number = 0
        for path in sorted(self._folder.glob("*.parquet")):
            with pq.ParquetFile(path) as file:
                for group in range(file.num_row_groups):
                    if number % self._ranks == self._rank:
                        rows += file.read_row_group(group, use_threads=False).num_rows
                    number += 1
        pa.set_memory_pool(chosen)
        return Turn(0, 0, rows)


class Stream:
    """This rank's half of an epoch, and the end of what is read ahead: as much was read before."""

    def __init__(self, folder: Path, rank: int, plan: Plan) -> None:
        described = rayzero.data.stream(
            rayzero.data.blocks(folder), shuffle_window=plan.window, threads=plan.threads
        )
        self._progress = TrainingProgress(global_batch=plan.batch, micro_batch=plan.micro_batch)
        self._source = StreamSource(described, 0, self._progress, lambda *_: None)
        # Data of a few GB would stay in a default cache: it has room for two windows, and what is
        # being read, as if there were more data.
        own_blocks = 2 * plan.window // plan.ranks + 1 + READ_FACTOR
        self._source.cache._room_bytes = int(1.01 * own_blocks * plan.rows * TOKENS * 4)
        split = StepSplit(assign_step(plan.batch, plan.ranks, rank, plan.micro_batch))
        self._micro_batches = MicroBatches(self._progress, split)
        self._loader = StepLoader(self._source, self._micro_batches)

    def take_turn(self) -> Turn:
        reads = self._source.cache.counters.reads
        wait_s = self._progress.data_wait_s
        steps = self._source.length // self._progress.global_batch
        rows = sum(len(batch["tokens"]) for batch in self._loader.steps(steps))
        self._progress.sample_cursor += steps * self._progress.global_batch
        self._micro_batches.forget()  # nothing was trained on
        for thread in threading.enumerate():
            if thread.name == "rayzero-blocks":
                thread.join()
        reads = self._source.cache.counters.reads - reads
        return Turn(0, 0, rows, reads, self._progress.data_wait_s - wait_s)


KINDS: dict[str, type[Scan | Stream]] = {"scan": Scan, "stream": Stream}


def rank_main(rank: int, folder: Path, plan: Plan, orders: Connection) -> None:
    """Body of a process: a turn for each name that it receives."""
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(plan.ranks)  # as a worker has it
    readers = {kind: make(folder, rank, plan) for kind, make in KINDS.items()}
    while (kind := orders.recv()) is not None:
        begin_s, cpu_s = time.perf_counter(), _cpu_s()
        turn = readers[kind].take_turn()
        wall_s = time.perf_counter() - begin_s
        orders.send(replace(turn, wall_s=wall_s, cpu_s=_cpu_s() - cpu_s))


def _cpu_s() -> float:
    """Of all threads of this process, in the kernel too."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def drop_from_page_cache(folder: Path) -> None:
    for path in folder.glob("*.parquet"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(plan: Plan, folder: Path) -> dict[str, list[Turn]]:
    """The turns of each kind, both ranks together."""
    context = mp.get_context("spawn")
    pipes = [context.Pipe() for _ in range(plan.ranks)]
    ranks = [
        context.Process(target=rank_main, args=(rank, folder, plan, pipe[1]), daemon=True)
        for rank, pipe in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    turns: dict[str, list[Turn]] = {kind: [] for kind in KINDS}
    for number in range(plan.turns + 1):  # the first one warms up
        for kind, done in turns.items():
            if plan.cold:
                drop_from_page_cache(folder)
            for orders, _ in pipes:
                orders.send(kind)
            own = [orders.recv() for orders, _ in pipes]
            if number:
                done.append(_add(own))
    for orders, _ in pipes:
        orders.send(None)
    for process in ranks:
        process.join(60)
    return turns


def _add(own: list[Turn]) -> Turn:
    total = {it.name: sum(getattr(turn, it.name) for turn in own) for it in fields(Turn)}
    return Turn(**{**total, "wall_s": max(turn.wall_s for turn in own)})


def summarize(plan: Plan, turns: dict[str, list[Turn]]) -> dict[str, Any]:
    """Medians, and the stream's rows a second of both times, as shares of the scan's.

    The rows are those of as many blocks as were read: a few stay in memory for the next epoch.
    """
    reads_by_block = median(turn.reads for turn in turns["stream"]) / plan.blocks
    blocks_read = {"scan": 1.0, "stream": reads_by_block}

    def rate(kind: str, clock: str) -> float:
        return blocks_read[kind] * median(turn.rows / getattr(turn, clock) for turn in turns[kind])

    return {
        "mb_per_s": {
            kind: {clock: rate(kind, clock) * TOKENS * 4 / 1e6 for clock in ("wall_s", "cpu_s")}
            for kind in KINDS
        },
        "ratio_wall": rate("stream", "wall_s") / rate("scan", "wall_s"),
        "ratio_cpu": rate("stream", "cpu_s") / rate("scan", "cpu_s"),
        "reads_by_block": reads_by_block,
    }


def print_summary(plan: Plan, machine: dict[str, Any], summary: dict[str, Any]) -> None:
    console = Console()
    table = Table("", "MB/s", "MB/s of processor time", title=f"{plan.nbytes / 1e6:.0f} MB")
    for kind, rates in summary["mb_per_s"].items():
        table.add_row(kind, f"{rates['wall_s']:.0f}", f"{rates['cpu_s']:.0f}")
    console.print(format_machine(machine))
    console.print(table)
    console.print(
        f"stream / scan: {summary['ratio_wall']:.2f} by the clock, {summary['ratio_cpu']:.2f} by "
        f"processor time; reads of a block by both ranks: {summary['reads_by_block']:.2f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--column", choices=COLUMNS, default="fixed")
    parser.add_argument("--cold", action="store_true", help="without the page cache's files")
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--groups", type=int, default=16, help="row groups of a file")
    parser.add_argument("--rows", type=int, default=2048, help="of a row group")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--micro-batch", type=int, default=128)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--threads", type=int, default=4, help="that read blocks, of a rank")
    parser.add_argument("--json", type=Path, help="write the result there")
    given = vars(parser.parse_args())
    path = given.pop("json")
    plan = Plan(**given)
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="rz-streams-") as name:
        write_files(Path(name), plan)
        turns = measure(plan, Path(name))
    summary = summarize(plan, turns)
    print_summary(plan, machine, summary)
    if path is not None:
        every = {kind: [asdict(turn) for turn in done] for kind, done in turns.items()}
        result = {"machine": machine, "plan": asdict(plan), **summary, "turns": every}
        path.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
