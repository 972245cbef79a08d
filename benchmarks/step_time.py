"""Seconds per optimizer step of rayzero and its peers, interleaved in the same processes.

Because machines are noisy and drift, each round times one step of every system between barriers, in
rotating order, and a step is compared with the DDP step of the same round. A step's time is that of
its slowest rank.
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
from torch import Tensor

from benchmarks.memory import PeakMemory
from benchmarks.systems import ALL, SYSTEMS, Step, missing_requirement
from examples.gpt.model import GPT, GPTConfig

BASE = "ddp"
MODEL = GPTConfig(vocab=8192, context=128, layers=8, width=512, heads=8, tie=True)
TOKENS = 128  # one micro-batch: 1 x TOKENS
BATCHES = 4  # repeated, so that the loss decreases and wrong updates are detected
LOSS_RTOL = 1e-3  # of the final loss; covers rounding


@dataclass(frozen=True)
class Plan:
    """Configuration of a measurement."""

    systems: list[str]
    rounds: int
    warmup: int
    ranks: int
    threads: int
    memory: bool = False  # sample the memory, which disturbs the times
    layers: int = MODEL.layers
    width: int = MODEL.width

    @property
    def model(self) -> GPTConfig:
        return replace(MODEL, layers=self.layers, width=self.width, heads=self.width // 64)


@dataclass(frozen=True)
class Measurement:
    """Seconds of every timed round and the final global loss, by system."""

    seconds: dict[str, list[float]]
    loss: dict[str, float]
    peak_bytes: int  # maximum over ranks, all systems together; 0 if not sampled


@dataclass(frozen=True)
class Row:
    """One system's line in the table."""

    system: str
    median_s: float
    min_s: float
    ratio: float | None  # of medians, relative to DDP
    paired_ratio: float | None  # median over rounds of the ratio to DDP in the same round
    loss: float
    peak_bytes: int | None  # in separate processes


def rank_main(rank: int, plan: Plan, folder: str) -> None:
    """Main function of a rank. Rank 0 writes the result to `folder`."""
    # set by a launcher; required by some systems
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(plan.ranks))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.simplefilter("ignore", FutureWarning)  # from peers' use of torch
    torch.set_num_threads(plan.threads)
    store = dist.FileStore(f"{folder}/store", plan.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.ranks)
    steps = {name: _build(name, plan.model) for name in plan.systems}
    if plan.memory:
        gc.collect()
        with PeakMemory() as peak:
            measurement = _run_rounds(rank, plan, steps, peak)
    else:
        measurement = _run_rounds(rank, plan, steps, None)
    if rank == 0:
        Path(folder, "measured.json").write_text(json.dumps(asdict(measurement)))
    dist.barrier()
    dist.destroy_process_group()


def _build(name: str, model: GPTConfig) -> Step:
    torch.manual_seed(0)
    return ALL[name](GPT(model))


def _run_rounds(
    rank: int, plan: Plan, steps: dict[str, Step], memory: PeakMemory | None
) -> Measurement:
    batches = [make_batch(rank, index) for index in range(BATCHES)]
    seconds: dict[str, list[float]] = {name: [] for name in plan.systems}
    losses: dict[str, Tensor] = {}
    gc.disable()  # collect between the timed steps only
    for number in range(plan.warmup + plan.rounds):
        start = number % len(plan.systems)
        for name in plan.systems[start:] + plan.systems[:start]:
            gc.collect()
            dist.barrier()
            start_s = perf_counter()
            losses[name] = steps[name](*batches[number % BATCHES])
            elapsed = torch.tensor(perf_counter() - start_s, dtype=torch.float64)
            dist.all_reduce(elapsed, dist.ReduceOp.MAX)
            if number >= plan.warmup:
                seconds[name].append(elapsed.item())
    for loss in losses.values():
        dist.all_reduce(loss)
    peak = torch.tensor(memory.nbytes if memory is not None else 0)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    means = {name: loss.item() / plan.ranks for name, loss in losses.items()}
    return Measurement(seconds, means, int(peak.item()))


def make_batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    row = torch.randint(MODEL.vocab, (1, TOKENS + 1), generator=generator)
    return row[:, :-1], row[:, 1:]


def run(plan: Plan) -> Measurement:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(plan, folder), nprocs=plan.ranks)
        return Measurement(**json.loads(Path(folder, "measured.json").read_text()))


def make_rows(measurement: Measurement, peak_bytes: dict[str, int]) -> list[Row]:
    """Compute the table; `peak_bytes` has the separately measured peaks by system."""
    base = measurement.seconds.get(BASE)
    return [
        Row(
            system=name,
            median_s=median(times),
            min_s=min(times),
            ratio=median(times) / median(base) if base else None,
            paired_ratio=(
                median(a / b for a, b in zip(times, base, strict=True)) if base else None
            ),
            loss=measurement.loss[name],
            peak_bytes=peak_bytes.get(name),
        )
        for name, times in measurement.seconds.items()
    ]


def find_diverging(loss: dict[str, float]) -> list[str]:
    """Systems whose final loss differs from DDP's, so that their times are not comparable."""
    base = loss[BASE]
    # not `>`: a NaN loss must count as diverging
    return [name for name, value in loss.items() if not abs(value - base) <= LOSS_RTOL * abs(base)]


def measure_peaks(plan: Plan) -> dict[str, int]:
    """Peak memory of a rank by system, measured in separate processes."""
    peaks = {}
    for name in plan.systems:
        single = replace(plan, systems=[name], rounds=3, warmup=2, memory=True)
        peaks[name] = run(single).peak_bytes
    return peaks


def describe_run(plan: Plan) -> dict[str, Any]:
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


def show(facts: dict[str, Any], rows: list[Row]) -> None:
    from rich.console import Console  # not needed by the benchmarks that import this module
    from rich.table import Table

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
    for row in rows:
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


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_time", description=__doc__)
    parser.add_argument(
        "--systems", default=",".join(SYSTEMS), help=f"comma-separated list of: {', '.join(ALL)}"
    )
    parser.add_argument("--rounds", type=int, default=30, help="timed steps of each system")
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps before those")
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--threads", type=int, default=1, help="threads per process")
    parser.add_argument("--layers", type=int, default=MODEL.layers, help="of the model")
    parser.add_argument("--width", type=int, default=MODEL.width, help="of the model")
    parser.add_argument(
        "--memory", action="store_true", help="also measure the peak memory of each system"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result to this file")
    options = parser.parse_args(arguments)
    options.systems = options.systems.split(",")
    unknown = [name for name in options.systems if name not in ALL]
    if unknown:
        parser.error(f"unknown systems {unknown}; allowed: {', '.join(ALL)}")
    return options


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    for name in options.systems:
        if missing_requirement(name):
            print(f"{name}: skipped, {missing_requirement(name)}")
    available = [name for name in options.systems if not missing_requirement(name)]
    if not available:
        return 0
    plan = Plan(
        systems=available,
        rounds=options.rounds,
        warmup=options.warmup,
        ranks=options.ranks,
        threads=options.threads,
        layers=options.layers,
        width=options.width,
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(plan.threads))  # inherited by the ranks
    measurement = run(plan)
    rows = make_rows(measurement, measure_peaks(plan) if options.memory else {})
    facts = describe_run(plan)
    show(facts, rows)
    if options.json:
        result = facts | {"rows": [asdict(row) for row in rows], "seconds": measurement.seconds}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if BASE not in measurement.loss:
        return 0
    diverging = find_diverging(measurement.loss)
    if diverging:
        print(f"final loss not within {LOSS_RTOL:g} of {BASE}'s, not comparable: {diverging}")
        return 1
    print(f"all final losses agree with {BASE}'s to {LOSS_RTOL:g}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
