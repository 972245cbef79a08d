"""Seconds per optimizer step: rayzero and its peers in turn, step by step, in the same processes.

Machines are noisy and drift, so systems are not run one after another: each round times one step of
every system between barriers, in an order that rotates, and what is compared is a round's step with
the DDP step of the same round. A step's time is that of its slowest rank.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.memory import PeakMemory
from benchmarks.systems import ALL, SYSTEMS, Step, missing
from examples.gpt.model import GPT, GPTConfig

BASE = "ddp"
MODEL = GPTConfig(vocab=8192, context=128, layers=8, width=512, heads=8, tie=True)
TOKENS = 128  # one micro-batch: 1 x TOKENS
BATCHES = 4  # so few that the loss falls, and a system that updates wrongly shows
AGREE = 1e-3  # relative difference of the final loss that rounding may explain


@dataclass(frozen=True)
class Plan:
    """What the ranks run."""

    systems: list[str]
    rounds: int
    warmup: int
    ranks: int
    threads: int
    memory: bool = False  # sample it, which disturbs the times
    layers: int = MODEL.layers
    width: int = MODEL.width

    @property
    def model(self) -> GPTConfig:
        return replace(MODEL, layers=self.layers, width=self.width, heads=self.width // 64)


@dataclass(frozen=True)
class Measured:
    """What they found: by system, the seconds of every timed round and the last global loss."""

    seconds: dict[str, list[float]]
    loss: dict[str, float]
    peak_bytes: int  # of the largest rank, all systems together; 0 when it was not sampled


@dataclass(frozen=True)
class Row:
    """One system's line in the table."""

    system: str
    median_s: float
    min_s: float
    ratio: float | None  # of the medians, to DDP's
    paired_ratio: float | None  # the median over rounds of the ratio to DDP's step of that round
    loss: float
    peak_bytes: int | None  # alone in its processes


def rank_main(rank: int, plan: Plan, folder: str) -> None:
    """One rank: builds every system, runs the rounds; rank 0 leaves the result in `folder`."""
    # what a launcher sets, for those that insist on one
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(plan.ranks))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.simplefilter("ignore", FutureWarning)  # how peers call torch is theirs to mend
    torch.set_num_threads(plan.threads)
    store = dist.FileStore(f"{folder}/store", plan.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.ranks)
    steps = {name: _build(name, plan.model) for name in plan.systems}
    if plan.memory:
        gc.collect()
        with PeakMemory() as peak:
            measured = _rounds(rank, plan, steps, peak)
    else:
        measured = _rounds(rank, plan, steps, None)
    if rank == 0:
        Path(folder, "measured.json").write_text(json.dumps(asdict(measured)))
    dist.barrier()
    dist.destroy_process_group()


def _build(name: str, model: GPTConfig) -> Step:
    torch.manual_seed(0)
    return ALL[name](GPT(model))


def _rounds(rank: int, plan: Plan, steps: dict[str, Step], memory: PeakMemory | None) -> Measured:
    batches = [batch(rank, number) for number in range(BATCHES)]
    seconds: dict[str, list[float]] = {name: [] for name in plan.systems}
    losses: dict[str, Tensor] = {}
    gc.disable()  # a collection is no system's fault: between the timed steps
    for turn in range(plan.warmup + plan.rounds):
        start = turn % len(plan.systems)
        for name in plan.systems[start:] + plan.systems[:start]:
            gc.collect()
            dist.barrier()
            begin = perf_counter()
            losses[name] = steps[name](*batches[turn % BATCHES])
            took = torch.tensor(perf_counter() - begin, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn >= plan.warmup:
                seconds[name].append(took.item())
    for loss in losses.values():
        dist.all_reduce(loss)
    peak = torch.tensor(memory.nbytes if memory is not None else 0)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    means = {name: loss.item() / plan.ranks for name, loss in losses.items()}
    return Measured(seconds, means, int(peak.item()))


def batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    row = torch.randint(MODEL.vocab, (1, TOKENS + 1), generator=generator)
    return row[:, :-1], row[:, 1:]


def run(plan: Plan) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(plan, folder), nprocs=plan.ranks)
        return Measured(**json.loads(Path(folder, "measured.json").read_text()))


def rows(measured: Measured, alone: dict[str, int]) -> list[Row]:
    """`alone`: each system's peak in bytes, where it was measured."""
    base = measured.seconds.get(BASE)
    return [
        Row(
            system=name,
            median_s=median(times),
            min_s=min(times),
            ratio=median(times) / median(base) if base else None,
            paired_ratio=(
                median(a / b for a, b in zip(times, base, strict=True)) if base else None
            ),
            loss=measured.loss[name],
            peak_bytes=alone.get(name),
        )
        for name, times in measured.seconds.items()
    ]


def disagreeing(loss: dict[str, float]) -> list[str]:
    """The systems whose final loss is not DDP's: they did other work, their time means nothing."""
    base = loss[BASE]
    # not `>`: a loss that is nan agrees with nothing
    return [name for name, value in loss.items() if not abs(value - base) <= AGREE * abs(base)]


def peaks_alone(plan: Plan) -> dict[str, int]:
    """Peak memory of a rank in steps of each system, in processes of its own."""
    peaks = {}
    for name in plan.systems:
        single = replace(plan, systems=[name], rounds=3, warmup=2, memory=True)
        peaks[name] = run(single).peak_bytes
    return peaks


def about(plan: Plan) -> dict[str, Any]:
    with torch.device("meta"):
        parameters = GPT(plan.model).num_parameters()
    return {
        "date": date.today().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "machine": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backend": "gloo",
        "parameters": parameters,
        "micro_batch": [1, TOKENS],
        **asdict(plan),
    }


def show(facts: dict[str, Any], found: list[Row]) -> None:
    console = Console()
    console.print(
        f"{facts['date']}: {facts['cores']} cores, {facts['machine']}, torch {facts['torch']}, "
        f"Python {facts['python']}\n"
        f"{facts['ranks']} {facts['backend']} ranks of {facts['threads']} thread, GPT of "
        f"{facts['parameters'] / 1e6:.1f} M parameters, micro-batch 1 x {TOKENS} tokens, fp32, "
        f"fused AdamW, clip 1.0; {facts['rounds']} rounds after {facts['warmup']} of warm-up"
    )
    table = Table(
        "system", "median s", "min s", "ratio", "paired ratio", "final loss", "peak memory"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for row in found:
        table.add_row(
            row.system,
            f"{row.median_s:.4f}",
            f"{row.min_s:.4f}",
            "-" if row.ratio is None else f"{row.ratio:.3f}",
            "-" if row.paired_ratio is None else f"{row.paired_ratio:.3f}",
            f"{row.loss:.5f}",
            "-" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.0f} MiB",
        )
    console.print(table)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_time", description=__doc__)
    parser.add_argument(
        "--systems", default=",".join(SYSTEMS), help=f"comma-separated, of: {', '.join(ALL)}"
    )
    parser.add_argument("--rounds", type=int, default=30, help="timed steps of each system")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each before that")
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--layers", type=int, default=MODEL.layers, help="of the model")
    parser.add_argument("--width", type=int, default=MODEL.width, help="of the model")
    parser.add_argument(
        "--memory", action="store_true", help="also run each alone for its peak memory"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result there")
    options = parser.parse_args(arguments)
    options.systems = options.systems.split(",")
    unknown = [name for name in options.systems if name not in ALL]
    if unknown:
        parser.error(f"unknown systems {unknown}; allowed: {', '.join(ALL)}")
    return options


def main(arguments: list[str]) -> int:
    options = parsed(arguments)
    for name in options.systems:
        if missing(name):
            print(f"{name}: skipped, {missing(name)}")
    present = [name for name in options.systems if not missing(name)]
    if not present:
        return 0
    plan = Plan(
        systems=present,
        rounds=options.rounds,
        warmup=options.warmup,
        ranks=options.ranks,
        threads=options.threads,
        layers=options.layers,
        width=options.width,
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(plan.threads))  # the ranks inherit it
    measured = run(plan)
    found = rows(measured, peaks_alone(plan) if options.memory else {})
    facts = about(plan)
    show(facts, found)
    if options.json:
        result = facts | {"rows": [asdict(row) for row in found], "seconds": measured.seconds}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if BASE not in measured.loss:
        return 0
    wrong = disagreeing(measured.loss)
    if wrong:
        print(f"final loss not within {AGREE:g} of {BASE}'s, other work was timed: {wrong}")
        return 1
    print(f"all final losses agree with {BASE}'s to {AGREE:g}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
