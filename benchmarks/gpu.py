"""Step time and memory on one GPU: rayzero at every stage against DDP, FSDP2 and DeepSpeed.

Each system runs in separate processes, so that its peak memory is measured alone. Several ranks on
one GPU (`--ranks`) require NCCL 2.30. Without a GPU only `--small` runs, on CPU ranks over gloo, as
a smoke test without meaningful times.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_rank import Plan, RankResult, rank_main
from benchmarks.systems import ALL, missing_requirement
from examples.gpt.model import GPT, GPTConfig
from rayzero.engine.accounting import StepWork, peak_flops

BASE = "ddp"
MODEL = GPTConfig(vocab=50304, context=1024, layers=24, width=1024, heads=16)
SMALL = Plan(GPTConfig(vocab=64, context=16, layers=2, width=32, heads=2), 2, 1, 2, 1, cuda=False)
LOSS_RTOL = 2e-2  # of the final loss; covers rounding to 16 bits
DEFAULT = [name for name in ALL if name != "ddp-plain"]
Number = TypeVar("Number", int, float)
MULTI_RANK_NCCL = 2, 30  # first NCCL version that allows several ranks per GPU


@dataclass(frozen=True)
class Row:
    """One system's line in the table: the maximum over its ranks.

    Attributes:
        mfu: model flops utilization, computed by `rayzero.engine.accounting`; None on a CPU.
        error: why there is no result; empty on success.
    """

    system: str
    median_s: float | None = None
    min_s: float | None = None
    ratio: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    communication_s: float | None = None
    copies_s: float | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    loss: float | None = None
    error: str = ""


def run(name: str, plan: Plan) -> list[RankResult]:
    """Measure one system. Returns the results of its ranks."""
    with tempfile.TemporaryDirectory() as folder:
        exit_error = ""
        try:
            mp.spawn(rank_main, args=(name, plan, folder), nprocs=plan.ranks)
        except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
            exit_error = str(error).strip().splitlines()[-1]
        paths = sorted(Path(folder).glob("rank*.json"))
        results = [RankResult(**json.loads(path.read_text())) for path in paths]
    reported = any(result.error for result in results)
    return results if reported or not exit_error else [RankResult([], error=exit_error)]


def make_row(
    name: str, results: list[RankResult], plan: Plan, flops: int, peak: float | None
) -> Row:
    """Aggregate the ranks' results into a row without its ratio.

    Args:
        flops: of one step on one rank.
        peak: FLOP/s of the GPUs that all ranks share; None if unknown.
    """
    if errors := [result.error for result in results if result.error]:
        return Row(name, error=errors[0])
    seconds = [max(times) for times in zip(*(result.seconds for result in results), strict=True)]
    median_s = median(seconds)
    return Row(
        name,
        median_s=median_s,
        min_s=min(seconds),
        tokens_per_s=plan.ranks * plan.batch * plan.model.context / median_s,
        mfu=None if peak is None else plan.ranks * flops / median_s / peak,
        communication_s=_max_or_none([r.communication_s for r in results]),
        copies_s=_max_or_none([r.copies_s for r in results]),
        peak_bytes=_max_or_none([r.peak_bytes for r in results]),
        reserved_bytes=_max_or_none([r.reserved_bytes for r in results]),
        loss=sum(result.loss for result in results) / len(results),
    )


def _max_or_none(values: Iterable[Number | None]) -> Number | None:
    return max((value for value in values if value is not None), default=None)


def with_ratios(rows: list[Row]) -> list[Row]:
    """Add the ratio of each row's median to that of DDP, if both exist."""
    base = next((row.median_s for row in rows if row.system == BASE), None)
    return [
        row if base is None or row.median_s is None else replace(row, ratio=row.median_s / base)
        for row in rows
    ]


def find_diverging(rows: list[Row]) -> list[str]:
    """Systems whose final loss differs from DDP's, so that their times are not comparable."""
    base = next((row.loss for row in rows if row.system == BASE), None)
    if base is None:
        return []
    # not `>`: a NaN loss must count as diverging
    return [
        row.system
        for row in rows
        if row.loss is not None and not abs(row.loss - base) <= LOSS_RTOL * abs(base)
    ]


def count_flops(plan: Plan) -> int:
    """FLOPs of one rank's forward and backward pass."""
    with torch.device("meta"):
        model = GPT(plan.model)
        tokens = torch.zeros((plan.batch, plan.model.context), dtype=torch.int64)
    work = StepWork(micro_steps=1, peak=1.0)
    with work.track_forward(tokens):
        loss = model(tokens, tokens)
    with work.track_backward(1.0):
        loss.backward()
    return work.micro_step_flops


def unsupported_reason(ranks: int, gpus: int, nccl: tuple[int, ...]) -> str:
    """Why this many ranks cannot run on this many GPUs; empty if they can."""
    if ranks <= gpus or nccl >= MULTI_RANK_NCCL:
        return ""
    installed, required = (".".join(map(str, version)) for version in (nccl, MULTI_RANK_NCCL))
    return (
        f"{ranks} ranks on {gpus} GPU are not possible: NCCL {installed} allows one rank per GPU, "
        f"{required} and newer several (LD_PRELOAD its libnccl.so.2)"
    )


def describe_run(plan: Plan) -> dict[str, Any]:
    with torch.device("meta"):
        parameters = GPT(plan.model).num_parameters()
    nccl = torch.cuda.nccl.version()[:3] if plan.cuda else ()
    return {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if plan.cuda else platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backend": f"NCCL {'.'.join(map(str, nccl))}" if plan.cuda else "gloo",
        "parameters": parameters,
        **asdict(plan),
    }


def show(facts: dict[str, Any], plan: Plan, rows: list[Row]) -> None:
    console = Console(width=150)
    precision = "bf16 with fp32 main weights" if plan.mixed else "fp32"
    console.print(
        f"{facts['date']}: {facts['device']}, torch {facts['torch']}, {facts['backend']}, Python "
        f"{facts['python']}\n{plan.ranks} ranks, GPT of {facts['parameters'] / 1e6:.1f} M "
        f"parameters, micro-batch {plan.batch} x {plan.model.context} tokens, {precision}, fused "
        f"AdamW, clip 1.0; {plan.steps} steps after {plan.warmup} of warm-up"
    )
    table = Table("system", "median ms", "min ms", "ratio", "tokens/s", "MFU")
    for title in ("exposed comm. ms", "exposed copies ms", "peak GiB", "reserved GiB", "loss"):
        table.add_column(title)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        if row.error:
            continue
        cells = [_ms(row.median_s), _ms(row.min_s), _format(row.ratio, ".3f")]
        cells += [_format(row.tokens_per_s, ",.0f"), _format(row.mfu, ".1%")]
        cells += [_ms(row.communication_s), _ms(row.copies_s)]
        cells += [_gib(row.peak_bytes), _gib(row.reserved_bytes), _format(row.loss, ".4f")]
        table.add_row(row.system, *cells)
    console.print(table)
    for row in rows:
        if row.error:
            console.print(f"{row.system}: {row.error}")


def _format(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def _gib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 2**30:.2f}"


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--systems", help=f"comma-separated list of: {', '.join(ALL)}")
    parser.add_argument("--ranks", type=int, default=1, help="processes, which share the GPUs")
    parser.add_argument("--layers", type=int, default=MODEL.layers)
    parser.add_argument("--width", type=int, default=MODEL.width)
    parser.add_argument("--batch", type=int, default=8, help="sequences per micro-batch")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--warmup", type=int, default=5, help="untimed steps before those")
    parser.add_argument("--fp32", action="store_true", help="instead of bf16")
    parser.add_argument("--small", action="store_true", help="a tiny model on CPU ranks")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result to this file")
    options = parser.parse_args(arguments)
    options.systems = options.systems.split(",") if options.systems else DEFAULT
    unknown = [name for name in options.systems if name not in ALL]
    if unknown:
        parser.error(f"unknown systems {unknown}; allowed: {', '.join(ALL)}")
    return options


def make_plan(options: argparse.Namespace) -> Plan:
    if options.small:
        return replace(SMALL, ranks=options.ranks, mixed=not options.fp32)
    model = replace(MODEL, layers=options.layers, width=options.width, heads=options.width // 64)
    sizes = options.batch, options.ranks, options.steps, options.warmup
    return Plan(model, *sizes, cuda=True, mixed=not options.fp32)


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    plan = make_plan(options)
    peak = None
    if plan.cuda:
        if not (torch.cuda.is_available() and dist.is_nccl_available()):
            print("no GPU or no NCCL is available; --small runs without", file=sys.stderr)
            return 2
        reason = unsupported_reason(
            plan.ranks, torch.cuda.device_count(), torch.cuda.nccl.version()[:3]
        )
        if reason:
            print(reason, file=sys.stderr)
            return 2
        if plan.ranks > torch.cuda.device_count():  # inherited by the ranks
            os.environ.update(NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_NVLS_ENABLE="0")
        gpus = min(plan.ranks, torch.cuda.device_count())
        gpu_peak = peak_flops(torch.device("cuda"), torch.bfloat16 if plan.mixed else torch.float32)
        peak = None if gpu_peak is None else gpus * gpu_peak
    flops = count_flops(plan)
    rows = []
    for name in options.systems:
        reason = missing_requirement(name)
        rows.append(
            Row(name, error=f"skipped: {reason}")
            if reason
            else make_row(name, run(name, plan), plan, flops, peak)
        )
    rows = with_ratios(rows)
    facts = describe_run(plan)
    show(facts, plan, rows)
    if options.json:
        result = facts | {"flops": flops, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if diverging := find_diverging(rows):
        print(f"final loss not within {LOSS_RTOL:g} of {BASE}'s, not comparable: {diverging}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
