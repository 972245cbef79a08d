"""Recovery time after a worker fault: seconds to the next finished step, minus that step.

    python -m benchmarks.recovery --kills 20
    python -m benchmarks.recovery --fault stop --kills 5 --json stop.json
    python -m benchmarks.recovery --fault deadlock --kills 20
    python -m benchmarks.recovery --kills 5 --layers 8 --width 512 --batch 12 --compile

Three CPU workers train the model of the GPT example. Repeatedly, after a few undisturbed steps, a
random worker is signaled at a uniformly random point in a step, or told to hang. The time is
measured from the signal for SIGKILL, and from the detection of the hang for the other faults, whose
whole time must be at most 10 s, or 5 usual steps (95th percentile), at default settings; of a read,
from the last step for which the rank had data.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import rayzero_job
from benchmarks.faults import SIGNALS, FaultCost
from benchmarks.hanging_gpt import HANGS
from benchmarks.machine import describe_machine, format_machine
from examples.gpt.prepare import prepare
from rayzero.engine.errors import RayzeroError

PARTS = (
    "report",
    "detect",
    "fence",
    "select_step",
    "select_members",
    "rendezvous",
    "load",
    "recompute",
)
"""`report` is the time from the fault to its first report to the controller; for the others see
`rayzero.orchestrator.job_events.Repaired`."""
COUNTS = ("steps_redone", "restarted")
FAULTS = (*SIGNALS, *HANGS)
HANG_LIMIT_S = 10.0


def show(console: Console, faults: list[FaultCost]) -> None:
    """Print a line per fault, the median and the maximum. Times are in milliseconds."""
    parts = [part for part in PARTS if any(part in fault.parts for fault in faults)]
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("ms", "rank", "total", *parts, "step", "redone", "new"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [
        [fault.total_s, *(fault.parts.get(part, 0.0) for part in parts), fault.step_s]
        for fault in faults
    ]
    for number, (fault, row) in enumerate(zip(faults, rows, strict=True), start=1):
        table.add_row(
            str(number), str(fault.rank), *_ms(row), str(fault.steps_redone), str(fault.restarted)
        )
    for name, aggregate in (("median", median), ("max", max)):
        columns = [aggregate(column) for column in zip(*rows, strict=True)]
        counts = (f"{aggregate([getattr(fault, key) for fault in faults]):g}" for key in COUNTS)
        table.add_row(name, "", *_ms(columns), *counts)
    console.print(table)


def _ms(seconds: Sequence[float]) -> list[str]:
    return [f"{1e3 * value:.0f}" for value in seconds]


def summarize(faults: list[FaultCost]) -> dict[str, Any]:
    """Aggregates. `strict_s` subtracts the median step instead of the one after the fault."""
    totals = [fault.total_s for fault in faults]
    strict = [fault.wall_s - fault.median_step_s for fault in faults]
    return {
        "total_s": {"median": median(totals), "max": max(totals)},
        "strict_s": {"median": median(strict), "max": max(strict)},
        "detection_s": {"median": median(fault.detection_s for fault in faults)},
        "hung_s": {
            "median": median(fault.hung_s for fault in faults),
            "max": max(fault.hung_s for fault in faults),
        },
        "median_step_s": median(fault.median_step_s for fault in faults),
        **{key: sum(getattr(fault, key) for fault in faults) for key in COUNTS},
    }


def measure(options: argparse.Namespace, console: Console, folder: Path) -> list[FaultCost]:
    plan = rayzero_job.Plan(
        options.workers,
        options.fault,
        options.kills,
        options.stage,
        options.seed,
        options.hang_timeout_s,
        folder,
        model={"layers": options.layers, "width": options.width, "heads": options.width // 64},
        compiled=options.compile,
        batch=options.batch,
        mirror_every=options.mirror_every,
    )
    return rayzero_job.run(plan, console.print)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--fault", choices=FAULTS, default="kill")
    parser.add_argument("--kills", type=int, default=20, help="number of faults")
    parser.add_argument("--workers", type=int, default=3, help="single-threaded processes")
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="ZeRO stage")
    parser.add_argument("--layers", type=int, default=4, help="of the GPT")
    parser.add_argument("--width", type=int, default=256, help="of the GPT; heads have 64 each")
    parser.add_argument("--batch", type=int, help="samples of a step; default: the example's")
    parser.add_argument("--mirror-every", type=int, metavar="STEPS", help="default: by its cost")
    parser.add_argument("--compile", action="store_true", help="by torch.compile, at first use")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument(
        "--hang-timeout-s", type=float, help="recovery.hang_timeout_s of the job; default: learned"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result to this file")
    options = parser.parse_args(arguments)
    if options.kills < 1 or options.workers < 2:
        parser.error("at least one fault and two workers are required")
    return options


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # inherited by the workers
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # the cluster is local
    console = Console()
    machine = describe_machine()
    prepare(Path("data/stdlib"))
    try:
        with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
            faults = measure(options, console, Path(folder))
    except (RayzeroError, TimeoutError) as error:
        console.print(f"[red]{error}[/red]")
        return 1
    totals = summarize(faults)
    console.print(
        f"{format_machine(machine)}\n{options.workers} single-threaded workers, "
        f"GPT example, {options.fault} of a random worker at a random point in a step"
    )
    show(console, faults)
    late = 0
    if options.fault != "kill":
        late = sum(it.hung_s > max(HANG_LIMIT_S, 5 * it.usual_step_s) for it in faults)
        console.print(
            f"detected after {totals['detection_s']['median']:.1f} s (median); detected and "
            f"repaired after {totals['hung_s']['median']:.1f} s (median), "
            f"{totals['hung_s']['max']:.1f} s (longest); {len(faults) - late} of {len(faults)} "
            f"within {HANG_LIMIT_S:g} s or 5 steps, each "
            f"{max(it.usual_step_s for it in faults):.2f} s at most"
        )
    console.print(
        f"median {totals['total_s']['median']:.3f} s, max {totals['total_s']['max']:.3f} s; minus "
        f"a median step ({totals['median_step_s']:.3f} s) instead of the one after the fault: "
        f"median {totals['strict_s']['median']:.3f} s, max {totals['strict_s']['max']:.3f} s\n"
        f"{totals['steps_redone']} finished steps were repeated, {totals['restarted']} other "
        f"processes restarted"
    )
    if options.json:
        settings = {key: getattr(options, key) for key in ("fault", "workers", "stage", "compile")}
        records = [asdict(fault) | {"total_s": fault.total_s} for fault in faults]
        report = machine | settings | {"summary": totals, "faults": records}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return int(bool(totals["steps_redone"] or totals["restarted"] or late))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
