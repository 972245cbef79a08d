"""Stage: step time and memory of rayzero at every stage against DDP, FSDP2 and DeepSpeed.

    python -m benchmarks.gpu.compare --help       # alone, with all settings

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
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.gpu.ranks import SHARDED, Plan, RankResult, rank_main
from benchmarks.gpu.report import Report, Settings
from benchmarks.gpu.rows import (
    BASE,
    LOSS_RTOL,
    Row,
    count_flops,
    find_diverging,
    make_row,
    unsupported_reason,
    with_ratios,
)
from benchmarks.systems import ALL, missing_requirement
from examples.gpt.model import GPT, GPTConfig
from rayzero.engine.accounting import peak_flops

MODEL = GPTConfig(vocab=50304, context=1024, layers=24, width=1024, heads=16)
SMALL = Plan(GPTConfig(vocab=64, context=16, layers=2, width=32, heads=2), 2, 1, 2, 1, cuda=False)
DEFAULT = [name for name in ALL if name != "ddp-plain"]
KNOWN = [*ALL, *(f"rayzero-{stage}{SHARDED}" for stage in (1, 2, 3))]
# Of the stage, what matters most first: there may be no time for the last ones.
FIRST = ["ddp", "fsdp2", "rayzero-3-sharded", "rayzero-2-sharded", "rayzero-0"]
FIRST += ["rayzero-1-sharded", "deepspeed-3", "deepspeed-2", "deepspeed-0", "deepspeed-1"]
# The goal on GPUs: faster and smaller, at the same stage.
PAIRS = [("rayzero-3-sharded", "fsdp2"), ("rayzero-0", "deepspeed-0")]
PAIRS += [(f"rayzero-{stage}-sharded", f"deepspeed-{stage}") for stage in (1, 2, 3)]
STAGE_STEPS, STAGE_WARMUP = 10, 5


def run_ranks(name: str, plan: Plan) -> list[RankResult]:
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


def find_peak(plan: Plan) -> float | None:
    """FLOP/s of the GPUs that all ranks share; None if unknown."""
    if not plan.cuda:
        return None
    peak = peak_flops(torch.device("cuda"), torch.bfloat16 if plan.mixed else torch.float32)
    return None if peak is None else min(plan.ranks, torch.cuda.device_count()) * peak


def measure(name: str, plan: Plan, flops: int, peak: float | None) -> Row:
    """The row of one system, without its ratio."""
    if reason := missing_requirement(name):
        return Row(name, error=f"skipped: {reason}")
    return make_row(name, run_ranks(name, plan), plan, flops, peak)


def run(report: Report, settings: Settings) -> None:
    """The stage: as many systems as there is time for."""
    full = Plan(MODEL, 8, 1, STAGE_STEPS, STAGE_WARMUP, cuda=True)
    plan = SMALL if settings.small else full
    report.value("plan", describe_run(plan))
    flops, peak = count_flops(plan), find_peak(plan)
    rows: list[Row] = []
    longest_s = 0.0
    for name in settings.systems or FIRST:
        if name not in KNOWN:
            report.skip(name, f"unknown; allowed: {', '.join(KNOWN)}")
            continue
        if report.left_s < 1.2 * longest_s:
            report.skip(name, "no time was left")
            continue
        started_s = monotonic()
        row = measure(name, plan, flops, peak)
        longest_s = max(longest_s, monotonic() - started_s)
        if row.error.startswith("skipped: "):
            report.skip(name, row.error.removeprefix("skipped: "))
            continue
        rows.append(row)
        report.check(f"{name} runs", not row.error, row.error or "yes", "yes")
        known = {key: value for key, value in asdict(with_ratios(rows)[-1]).items() if value}
        report.value(name, {key: value for key, value in known.items() if key != "system"})
    if settings.on_gpu:
        _compare_pairs(report, {row.system: row for row in rows if not row.error})
    diverging = find_diverging(rows)
    report.check("final losses", not diverging, diverging, f"within {LOSS_RTOL:g} of {BASE}'s")


def _compare_pairs(report: Report, rows: dict[str, Row]) -> None:
    """Checks the goal on GPUs for all pairs that were measured."""
    for ours, theirs in PAIRS:
        if ours in rows and theirs in rows:
            for what in ("median_s", "peak_bytes"):
                own, other = getattr(rows[ours], what), getattr(rows[theirs], what)
                report.check(f"{ours}: {what}", own <= other, own, f"<= {other} of {theirs}")


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
    from rich.console import Console  # not needed by the stage
    from rich.table import Table

    console = Console(width=150)
    precision = "bf16 with fp32 main weights" if plan.mixed else "fp32"
    console.print(
        f"{facts['date']}: {facts['device']}, torch {facts['torch']}, {facts['backend']}, Python "
        f"{facts['python']}\n{plan.ranks} ranks, GPT of {facts['parameters'] / 1e6:.1f} M "
        f"parameters, micro-batch {plan.batch} x {plan.model.context} tokens, {precision}, fused "
        f"AdamW, clip 1.0; {plan.steps} steps after {plan.warmup} of warm-up"
    )
    table = Table("system", "median ms", "min ms", "ratio", "tokens/s", "MFU")
    for title in (
        "exposed comm. ms",
        "exposed copies ms",
        "static GiB",
        "peak GiB",
        "reserved GiB",
        "loss",
    ):
        table.add_column(title)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        if row.error:
            continue
        cells = [_ms(row.median_s), _ms(row.min_s), _format(row.ratio, ".3f")]
        cells += [_format(row.tokens_per_s, ",.0f"), _format(row.mfu, ".1%")]
        cells += [_ms(row.communication_s), _ms(row.copies_s)]
        cells += [
            _gib(row.static_bytes),
            _gib(row.peak_bytes),
            _gib(row.reserved_bytes),
            _format(row.loss, ".4f"),
        ]
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.compare", description=__doc__)
    parser.add_argument("--systems", help=f"comma-separated list of: {', '.join(KNOWN)}")
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
    unknown = [name for name in options.systems if name not in KNOWN]
    if unknown:
        parser.error(f"unknown systems {unknown}; allowed: {', '.join(KNOWN)}")
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
    flops, peak = count_flops(plan), find_peak(plan)
    rows = with_ratios([measure(name, plan, flops, peak) for name in options.systems])
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
