"""Seconds to save a sharded state and to load it at another world size.

Compares raw writes, `torch.distributed.checkpoint` and rayzero, interleaved in the same processes.
Two ranks save, three load; every tensor is sharded by rows. The time is that of the slowest rank.
Loads read from the page cache. rayzero verifies checksums.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from rayzero.engine.checkpoint.manifest import make_manifest
from rayzero.engine.checkpoint.reader import CheckpointSource
from rayzero.engine.checkpoint.writer import commit_checkpoint, write_rank_file
from rayzero.engine.layout.reshard import plan_copies
from rayzero.engine.layout.state_index import BlockIndex, LogicalTensor, TensorRange

SAVERS, LOADERS = 2, 3
COLUMNS = 1024
ROWS = 4098  # per tensor: divisible by both world sizes, so that DTensor shards evenly
CHUNK_BYTES = 8 << 20  # per raw write
ITEM_BYTES = 4

Operation = Callable[[str], None]
"""Save to a folder, or load from it."""


@dataclass(frozen=True)
class Plan:
    """Configuration of a measurement."""

    rounds: int
    tensors: int

    @property
    def nbytes(self) -> int:
        return self.tensors * ROWS * COLUMNS * ITEM_BYTES


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    operation: str
    median_s: float
    min_s: float
    mb_per_s: float


class State:
    """A rank's shard of every tensor in one contiguous buffer, laid out like a vault slot."""

    def __init__(self, rank: int, world: int, plan: Plan) -> None:
        count = ROWS // world * COLUMNS
        tensor = LogicalTensor("F32", (ROWS, COLUMNS))
        names = [f"weights/{number}" for number in range(plan.tensors)]
        self.rank, self.world = rank, world
        self.memory = torch.zeros(plan.tensors * count)
        self.buffer = memoryview(self.memory.numpy()).cast("B")
        self.index = BlockIndex(
            dict.fromkeys(names, tensor),
            tuple(
                TensorRange(name, rank * count, (rank + 1) * count, number * count * ITEM_BYTES)
                for number, name in enumerate(names)
            ),
            self.memory.nbytes,
        )
        mesh = init_device_mesh("cpu", (world,))
        self.tensors = {
            name: DTensor.from_local(part.view(-1, COLUMNS), mesh, [Shard(0)])
            for name, part in zip(names, self.memory.split(count), strict=True)
        }

    def fill(self) -> None:
        """Fill with values that depend on the position."""
        for number, tensor in enumerate(self.tensors.values()):
            self._expected(number, out=tensor.to_local())

    def check(self) -> None:
        """Raise if a value is wrong, then clear all values."""
        for number, tensor in enumerate(self.tensors.values()):
            if not torch.equal(tensor.to_local(), self._expected(number)):
                raise SystemExit(f"rank {self.rank}: tensor {number} differs from the saved one")
        self.memory.zero_()

    def _expected(self, number: int, out: Tensor | None = None) -> Tensor:
        count = ROWS // self.world * COLUMNS
        start = self.rank * count
        values = torch.arange(start, start + count).add_(number).float().view(-1, COLUMNS)
        return values if out is None else out.copy_(values)


def raw_save(state: State) -> Operation:
    def save(folder: str) -> None:
        Path(folder).mkdir(exist_ok=True)
        with open(f"{folder}/{state.rank}", "wb", buffering=0) as file:
            for offset in range(0, len(state.buffer), CHUNK_BYTES):
                file.write(state.buffer[offset : offset + CHUNK_BYTES])
            os.fsync(file.fileno())

    return save


def dcp_save(state: State) -> Operation:
    def save(folder: str) -> None:
        dcp.save(dict(state.tensors), checkpoint_id=folder)

    return save


def rayzero_save(state: State) -> Operation:
    def save(folder: str) -> None:
        file = write_rank_file(
            folder, state.rank, state.index, {"step": 1}, state.buffer, generation=1, world_size=2
        )
        files = [file] * state.world
        dist.all_gather_object(files, file)
        if state.rank == 0:
            commit_checkpoint(folder, make_manifest("benchmark", 1, 1, files))

    return save


def dcp_load(state: State) -> Operation:
    def load(folder: str) -> None:
        dcp.load(dict(state.tensors), checkpoint_id=folder)

    return load


def rayzero_load(state: State) -> Operation:
    def load(folder: str) -> None:
        source = CheckpointSource(folder)
        held = [index.ranges for index in source.block_indexes]
        for copy in plan_copies(state.index.ranges, held):
            target = copy.wanted.offset + (copy.start - copy.wanted.start) * ITEM_BYTES
            offset = copy.held.offset + (copy.start - copy.held.start) * ITEM_BYTES
            data = state.buffer[target : target + copy.numel * ITEM_BYTES]
            source.read(copy.source, offset, data)
        source.close()

    return load


SAVES = {"write + fsync": raw_save, "DCP save": dcp_save, "rayzero save": rayzero_save}
LOADS = {"DCP load": dcp_load, "rayzero load": rayzero_load}
SOURCES = {"DCP load": "DCP save", "rayzero load": "rayzero save"}


def rank_main(rank: int, world: int, plan: Plan, folder: str) -> None:
    """Main function of a saving or loading rank. Rank 0 writes the seconds to `folder`."""
    store = f"file://{folder}/store-{world}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    torch.set_num_threads(1)
    state = State(rank, world, plan)
    saving = world == SAVERS
    if saving:
        state.fill()
    seconds: dict[str, list[float]] = {}
    for number in range(plan.rounds + 1):
        for name, make in (SAVES if saving else LOADS).items():
            path = f"{folder}/{(name if saving else SOURCES[name]).replace(' ', '-')}"
            if saving and rank == 0:
                shutil.rmtree(path, ignore_errors=True)
            elapsed = _timed(make(state), path)
            if number > 0:  # the first round is a warm-up
                seconds.setdefault(name, []).append(elapsed)
            if not saving:
                state.check()
    if rank == 0:
        Path(folder, f"seconds-{world}.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def _timed(operation: Operation, folder: str) -> float:
    os.sync()  # flush pending writes of earlier operations
    dist.barrier()
    start = time.perf_counter()
    operation(folder)
    elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return float(elapsed)


def run(plan: Plan, parent: Path | None) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        for world in (SAVERS, LOADERS):
            mp.spawn(rank_main, args=(world, plan, folder), nprocs=world)
            seconds = json.loads(Path(folder, f"seconds-{world}.json").read_text())
            rows += [
                Row(name, median(times), min(times), plan.nbytes / median(times) / 1e6)
                for name, times in seconds.items()
            ]
    return rows


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="timed runs of each operation")
    parser.add_argument("--tensors", type=int, default=24, help="tensors of 16.8 MB in the state")
    parser.add_argument(
        "--folder", type=Path, help="folder on the disk to measure; default: temporary"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result to this file")
    options = parser.parse_args(arguments)
    plan = Plan(options.rounds, options.tensors)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = run(plan, options.folder)
    facts = {
        "date": date.today().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "bytes": plan.nbytes,
        "rounds": plan.rounds,
    }
    console = Console()
    console.print(
        f"{facts['date']}: {facts['cores']} cores, torch {facts['torch']}, "
        f"{plan.nbytes / 1e6:.0f} MB, {SAVERS} ranks save, {LOADERS} load, {plan.rounds} rounds"
    )
    table = Table("", "median s", "min s", "MB/s")
    for row in rows:
        table.add_row(
            row.operation, f"{row.median_s:.3f}", f"{row.min_s:.3f}", f"{row.mb_per_s:.0f}"
        )
    console.print(table)
    if options.json:
        result = facts | {"rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
