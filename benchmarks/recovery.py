"""Seconds from a worker's death to the next finished step, less that step; and what was lost.

    python -m benchmarks.recovery --kills 20
    python -m benchmarks.recovery --fault stop --kills 5 --json stop.json
    python -m benchmarks.recovery --system ray-train --kills 2

Three CPU workers train the demo's model. Again and again one of them, drawn by chance, is struck at
a moment that is uniform over a step's time, when the job has been quiet for a few steps. SIGKILL
counts from just before the signal is sent, SIGSTOP from the verdict that the worker hangs.
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

from benchmarks import ray_train, struck_job
from benchmarks.machine import facts, told
from benchmarks.strikes import SIGNALS, Strike
from examples.gpt.prepare import prepare
from rayzero.engine.errors import RayzeroError

PARTS = (
    "sign",
    "detect",
    "fence",
    "select_step",
    "select_members",
    "rendezvous",
    "load",
    "recompute",
)
"""`sign` is the time from the fault to the controller's first sign of it; the others are those of
`rayzero.orchestrator.job_events.Repaired`."""


COUNTS = ("steps_redone", "restarted")


def show(console: Console, found: list[Strike]) -> None:
    """One line a strike, and the median and the maximum of them. Times in milliseconds."""
    parts = [part for part in PARTS if any(part in one.parts for one in found)]
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("ms", "rank", "total", *parts, "step", "redone", "new"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [
        [one.total_s, *(one.parts.get(part, 0.0) for part in parts), one.step_s] for one in found
    ]
    for number, (one, row) in enumerate(zip(found, rows, strict=True), start=1):
        rank = "-" if one.rank is None else str(one.rank)
        table.add_row(str(number), rank, *_ms(row), str(one.steps_redone), str(one.restarted))
    for name, of in (("median", median), ("max", max)):
        columns = [of(column) for column in zip(*rows, strict=True)]
        counts = (f"{of([getattr(one, key) for one in found]):g}" for key in COUNTS)
        table.add_row(name, "", *_ms(columns), *counts)
    console.print(table)


def _ms(seconds: Sequence[float]) -> list[str]:
    return [f"{1e3 * one:.0f}" for one in seconds]


def summary(found: list[Strike]) -> dict[str, Any]:
    """`strict_s` takes an ordinary step off instead of the one after the fault, which is longer."""
    totals, strict = [one.total_s for one in found], [one.wall_s - one.usual_s for one in found]
    return {
        "total_s": {"median": median(totals), "max": max(totals)},
        "strict_s": {"median": median(strict), "max": max(strict)},
        "noticed_s": {"median": median(one.noticed_s for one in found)},
        "usual_step_s": median(one.usual_s for one in found),
        **{key: sum(getattr(one, key) for one in found) for key in COUNTS},
    }


def measure(options: argparse.Namespace, console: Console, folder: Path) -> list[Strike]:
    if options.system == "ray-train":
        train = ray_train.Plan(
            options.workers, options.fault, options.kills, options.seed, str(folder)
        )
        return ray_train.strikes(train, console.print)
    plan = struck_job.Plan(
        options.workers,
        options.fault,
        options.kills,
        options.stage,
        options.seed,
        options.hang_timeout_s,
        folder,
    )
    return struck_job.strikes(plan, console.print)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--system", choices=("rayzero", "ray-train"), default="rayzero")
    parser.add_argument("--fault", choices=[*SIGNALS], default="kill", help="SIGKILL or SIGSTOP")
    parser.add_argument("--kills", type=int, default=20, help="how many faults")
    parser.add_argument("--workers", type=int, default=3, help="processes, each of one thread")
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="ZeRO stage")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument(
        "--hang-timeout-s", type=float, default=5.0, help="recovery.hang_timeout_s of the job"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result there")
    options = parser.parse_args(arguments)
    if options.kills < 1 or options.workers < 2:
        parser.error("at least one fault and two workers are needed")
    if options.system == "ray-train" and options.fault != "kill":
        parser.error("Ray Train is struck by --fault kill only")
    return options


def main(arguments: list[str]) -> int:
    options = parsed(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers inherit it
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # the cluster is our own
    console = Console()
    about = facts()
    prepare(Path("data/stdlib"))
    try:
        with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
            found = measure(options, console, Path(folder))
    except (RayzeroError, TimeoutError) as error:
        console.print(f"[red]{error}[/red]")
        return 1
    whole = summary(found)
    console.print(
        f"{told(about)}\n{options.system}: {options.workers} workers of one thread, the demo's "
        f"model, {options.fault} of a random one at a random moment of a step"
    )
    show(console, found)
    if options.fault == "stop":
        console.print(f"a stop was noticed after {whole['noticed_s']['median']:.1f} s (median)")
    console.print(
        f"median {whole['total_s']['median']:.3f} s, max {whole['total_s']['max']:.3f} s; less an "
        f"ordinary step ({whole['usual_step_s']:.3f} s) instead of the one after the fault: median "
        f"{whole['strict_s']['median']:.3f} s, max {whole['strict_s']['max']:.3f} s\n"
        f"{whole['steps_redone']} finished steps were done again, {whole['restarted']} other "
        f"processes restarted"
    )
    if options.json:
        given = {key: getattr(options, key) for key in ("system", "fault", "workers", "stage")}
        strikes = [asdict(one) | {"total_s": one.total_s} for one in found]
        result = about | given | {"summary": whole, "strikes": strikes}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    lost = whole["steps_redone"] or whole["restarted"]
    return int(options.system == "rayzero" and bool(lost))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
