"""Seconds to save a sharded state and to load it at another world size: a disk's own speed,
`torch.distributed.checkpoint` and rayzero in turn, in the same processes.

Two ranks save, three load; each has its rows of every tensor. What is timed is the slowest rank.
Loading finds the files in the page cache. Ours is verified against its checksums.
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
from rich.table import Table as Grid
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
ROWS = 4098  # of each tensor: both worlds divide it, as DTensor's shards need it to be quick
CHUNK_BYTES = 8 << 20  # of the raw write
ITEM_BYTES = 4

Operation = Callable[[str], None]
"""Saves to a folder, or loads from it."""


@dataclass(frozen=True)
class Plan:
    """What the ranks run."""

    rounds: int
    tensors: int

    @property
    def nbytes(self) -> int:
        return self.tensors * ROWS * COLUMNS * ITEM_BYTES


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    median_s: float
    min_s: float
    mb_per_s: float


class State:
    """A rank's rows of every tensor, behind one another in one block, as a slot has them."""

    def __init__(self, rank: int, world: int, plan: Plan) -> None:
        count = ROWS // world * COLUMNS
        tensor = LogicalTensor("F32", (ROWS, COLUMNS))
        names = [f"weights/{number}" for number in range(plan.tensors)]
        self.rank, self.world = rank, world
        self.memory = torch.zeros(plan.tensors * count)
        self.raw = memoryview(self.memory.numpy()).cast("B")
        self.table = BlockIndex(
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
        """Values that say where in the state they are."""
        for number, one in enumerate(self.tensors.values()):
            self._expected(number, out=one.to_local())

    def check(self) -> None:
        """Raises when a value is not where it was, then forgets them all."""
        for number, one in enumerate(self.tensors.values()):
            if not torch.equal(one.to_local(), self._expected(number)):
                raise SystemExit(f"rank {self.rank}: tensor {number} is not what was saved")
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
            for at in range(0, len(state.raw), CHUNK_BYTES):
                file.write(state.raw[at : at + CHUNK_BYTES])
            os.fsync(file.fileno())

    return save


def dcp_save(state: State) -> Operation:
    def save(folder: str) -> None:
        dcp.save(dict(state.tensors), checkpoint_id=folder)

    return save


def our_save(state: State) -> Operation:
    def save(folder: str) -> None:
        file = write_rank_file(
            folder, state.rank, state.table, {"step": 1}, state.raw, generation=1, world_size=2
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


def our_load(state: State) -> Operation:
    def load(folder: str) -> None:
        source = CheckpointSource(folder)
        held = [table.ranges for table in source.block_indexes]
        for copy in plan_copies(state.table.ranges, held):
            at = copy.wanted.offset + (copy.start - copy.wanted.start) * ITEM_BYTES
            place = copy.held.offset + (copy.start - copy.held.start) * ITEM_BYTES
            source.read(copy.source, place, state.raw[at : at + copy.numel * ITEM_BYTES])
        source.close()

    return load


SAVES = {"write + fsync": raw_save, "DCP save": dcp_save, "rayzero save": our_save}
LOADS = {"DCP load": dcp_load, "rayzero load": our_load}
SAVED = {"DCP load": "DCP save", "rayzero load": "rayzero save"}


def rank_main(rank: int, world: int, plan: Plan, folder: str) -> None:
    """One rank of the savers or of the loaders; rank 0 leaves the seconds in `folder`."""
    store = f"file://{folder}/store-{world}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    torch.set_num_threads(1)
    state = State(rank, world, plan)
    saving = world == SAVERS
    if saving:
        state.fill()
    seconds: dict[str, list[float]] = {}
    for turn in range(plan.rounds + 1):
        for name, make in (SAVES if saving else LOADS).items():
            place = f"{folder}/{(name if saving else SAVED[name]).replace(' ', '-')}"
            if saving and rank == 0:
                shutil.rmtree(place, ignore_errors=True)
            took = _timed(make(state), place)
            if turn > 0:  # the first one warms up
                seconds.setdefault(name, []).append(took)
            if not saving:
                state.check()
    if rank == 0:
        Path(folder, f"seconds-{world}.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def _timed(operation: Operation, folder: str) -> float:
    os.sync()  # what others left to be written is not to be paid for here
    dist.barrier()
    begin = time.perf_counter()
    operation(folder)
    took = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def run(plan: Plan, parent: Path | None) -> list[Row]:
    found = []
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        for world in (SAVERS, LOADERS):
            mp.spawn(rank_main, args=(world, plan, folder), nprocs=world)
            seconds = json.loads(Path(folder, f"seconds-{world}.json").read_text())
            found += [
                Row(name, median(times), min(times), plan.nbytes / median(times) / 1e6)
                for name, times in seconds.items()
            ]
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="timed runs of each")
    parser.add_argument("--tensors", type=int, default=24, help="tensors of 16.8 MB in the state")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: temporary")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result there")
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
    grid = Grid("", "median s", "min s", "MB/s")
    for row in rows:
        grid.add_row(row.what, f"{row.median_s:.3f}", f"{row.min_s:.3f}", f"{row.mb_per_s:.0f}")
    console.print(grid)
    if options.json:
        result = facts | {"rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
