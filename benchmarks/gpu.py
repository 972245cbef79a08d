"""Step time and memory on one GPU: rayzero at every stage against DDP, FSDP2 and DeepSpeed.

Each system is alone in its processes, so that its peak memory is its own. Several ranks on one GPU
need NCCL 2.30 (`--ranks`). Without a GPU only `--small` runs, on CPU ranks over gloo: it shows that
the benchmark works, and measures nothing.
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

from benchmarks.gpu_rank import Found, Plan, rank_main
from benchmarks.systems import ALL, missing
from examples.gpt.model import GPT, GPTConfig
from rayzero.engine.accounting import StepWork, peak_flops

BASE = "ddp"
MODEL = GPTConfig(vocab=50304, context=1024, layers=24, width=1024, heads=16)
SMALL = Plan(GPTConfig(vocab=64, context=16, layers=2, width=32, heads=2), 2, 1, 2, 1, cuda=False)
AGREE = 2e-2  # relative difference of the final loss that rounding to 16 bits may explain
DEFAULT = [name for name in ALL if name != "ddp-plain"]
Number = TypeVar("Number", int, float)
SEVERAL_RANKS = 2, 30  # the NCCL that first allows them on one GPU


@dataclass(frozen=True)
class Row:
    """One system's line in the table; the slowest, the fullest rank's numbers.

    Attributes:
        mfu: model flops utilisation, as `rayzero.engine.accounting` counts it; None on a CPU.
        error: why there are no numbers; empty if there are.
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


def run(name: str, plan: Plan) -> list[Found]:
    """What every rank found of one system."""
    with tempfile.TemporaryDirectory() as folder:
        died = ""
        try:
            mp.spawn(rank_main, args=(name, plan, folder), nprocs=plan.ranks)
        except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
            died = str(error).strip().splitlines()[-1]
        paths = sorted(Path(folder).glob("rank*.json"))
        found = [Found(**json.loads(path.read_text())) for path in paths]
    told = any(one.error for one in found)
    return found if told or not died else [Found([], error=died)]


def row(name: str, found: list[Found], plan: Plan, flops: int, peak: float | None) -> Row:
    """A system's line, but for its ratio. `flops` of one rank's step, `peak` of the GPU a second,
    which its ranks share."""
    if errors := [one.error for one in found if one.error]:
        return Row(name, error=errors[0])
    seconds = [max(times) for times in zip(*(one.seconds for one in found), strict=True)]
    middle = median(seconds)
    return Row(
        name,
        median_s=middle,
        min_s=min(seconds),
        tokens_per_s=plan.ranks * plan.batch * plan.model.context / middle,
        mfu=None if peak is None else plan.ranks * flops / middle / peak,
        communication_s=_most([one.communication_s for one in found]),
        copies_s=_most([one.copies_s for one in found]),
        peak_bytes=_most([one.peak_bytes for one in found]),
        reserved_bytes=_most([one.reserved_bytes for one in found]),
        loss=sum(one.loss for one in found) / len(found),
    )


def _most(values: Iterable[Number | None]) -> Number | None:
    return max((one for one in values if one is not None), default=None)


def with_ratios(found: list[Row]) -> list[Row]:
    """The same rows, with their median's ratio to that of DDP, where there is one."""
    base = next((one.median_s for one in found if one.system == BASE), None)
    return [
        one if base is None or one.median_s is None else replace(one, ratio=one.median_s / base)
        for one in found
    ]


def disagreeing(found: list[Row]) -> list[str]:
    """The systems whose final loss is not DDP's: they did other work, their time means nothing."""
    base = next((one.loss for one in found if one.system == BASE), None)
    if base is None:
        return []
    # not `>`: a loss that is nan agrees with nothing
    return [
        one.system
        for one in found
        if one.loss is not None and not abs(one.loss - base) <= AGREE * abs(base)
    ]


def flops_of(plan: Plan) -> int:
    """Of one rank's forward and backward."""
    with torch.device("meta"):
        model = GPT(plan.model)
        tokens = torch.zeros((plan.batch, plan.model.context), dtype=torch.int64)
    work = StepWork(micro_steps=1, peak=1.0)
    with work.track_forward(tokens):
        loss = model(tokens, tokens)
    with work.track_backward(1.0):
        loss.backward()
    return work.micro_step_flops


def impossible(ranks: int, gpus: int, nccl: tuple[int, ...]) -> str:
    """Why so many ranks cannot run on so many GPUs; empty when they can."""
    if ranks <= gpus or nccl >= SEVERAL_RANKS:
        return ""
    have, need = (".".join(str(one) for one in version) for version in (nccl, SEVERAL_RANKS))
    return (
        f"{ranks} ranks on {gpus} GPU are not possible: NCCL {have} allows one rank a GPU, "
        f"{need} and newer several (LD_PRELOAD its libnccl.so.2)"
    )


def about(plan: Plan) -> dict[str, Any]:
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


def show(facts: dict[str, Any], plan: Plan, found: list[Row]) -> None:
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
    for one in found:
        if one.error:
            continue
        cells = [_ms(one.median_s), _ms(one.min_s), _as(one.ratio, ".3f")]
        cells += [_as(one.tokens_per_s, ",.0f"), _as(one.mfu, ".1%")]
        cells += [_ms(one.communication_s), _ms(one.copies_s)]
        cells += [_gib(one.peak_bytes), _gib(one.reserved_bytes), _as(one.loss, ".4f")]
        table.add_row(one.system, *cells)
    console.print(table)
    for one in found:
        if one.error:
            console.print(f"{one.system}: {one.error}")


def _as(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def _gib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 2**30:.2f}"


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--systems", help=f"comma-separated, of: {', '.join(ALL)}")
    parser.add_argument("--ranks", type=int, default=1, help="processes, which share the GPUs")
    parser.add_argument("--layers", type=int, default=MODEL.layers)
    parser.add_argument("--width", type=int, default=MODEL.width)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a micro-batch")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--warmup", type=int, default=5, help="steps before those")
    parser.add_argument("--fp32", action="store_true", help="instead of bf16")
    parser.add_argument("--small", action="store_true", help="a tiny model on CPU ranks")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result there")
    options = parser.parse_args(arguments)
    options.systems = options.systems.split(",") if options.systems else DEFAULT
    unknown = [name for name in options.systems if name not in ALL]
    if unknown:
        parser.error(f"unknown systems {unknown}; allowed: {', '.join(ALL)}")
    return options


def planned(options: argparse.Namespace) -> Plan:
    if options.small:
        return replace(SMALL, ranks=options.ranks, mixed=not options.fp32)
    model = replace(MODEL, layers=options.layers, width=options.width, heads=options.width // 64)
    sizes = options.batch, options.ranks, options.steps, options.warmup
    return Plan(model, *sizes, cuda=True, mixed=not options.fp32)


def main(arguments: list[str]) -> int:
    options = parsed(arguments)
    plan = planned(options)
    peak = None
    if plan.cuda:
        if not (torch.cuda.is_available() and dist.is_nccl_available()):
            print("there is no GPU here, or no NCCL; --small runs without", file=sys.stderr)
            return 2
        why = impossible(plan.ranks, torch.cuda.device_count(), torch.cuda.nccl.version()[:3])
        if why:
            print(why, file=sys.stderr)
            return 2
        if plan.ranks > torch.cuda.device_count():  # the ranks inherit them
            os.environ.update(NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_NVLS_ENABLE="0")
        gpus = min(plan.ranks, torch.cuda.device_count())
        one = peak_flops(torch.device("cuda"), torch.bfloat16 if plan.mixed else torch.float32)
        peak = None if one is None else gpus * one
    flops = flops_of(plan)
    found = []
    for name in options.systems:
        reason = missing(name)
        found.append(
            Row(name, error=f"skipped: {reason}")
            if reason
            else row(name, run(name, plan), plan, flops, peak)
        )
    found = with_ratios(found)
    facts = about(plan)
    show(facts, plan, found)
    if options.json:
        result = facts | {"flops": flops, "rows": [asdict(one) for one in found]}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if wrong := disagreeing(found):
        print(f"final loss not within {AGREE:g} of {BASE}'s, other work was timed: {wrong}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
