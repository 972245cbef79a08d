"""Random faults of every kind, again and again: does anything get lost?

    python -m benchmarks.soak --faults 100 --seed 1
    python -m benchmarks.soak --faults 100 --seed 1 --resume

Jobs of three workers are run one after another, each with a few faults. Each must succeed, every
fault must have happened, the final weights must be plain torch's (float64, 1e-9 relative), and the
ledger must show every sample exactly once. Exit code 1 if anything of that is not so.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.clusters import connect_to_cluster
from benchmarks.episode import CALM, WORLD_SIZE, Outcome, Plan, Way, kind_of, plan, run
from benchmarks.machine import describe_machine, format_machine
from rayzero.workers.chaos.spec import FAULT_KINDS

EPISODE_FAULTS = 5
ON_ONE_NODE = tuple(name for name, kind in FAULT_KINDS.items() if kind.target != "cluster")
ON_SEVERAL = (*ON_ONE_NODE, "drop_node")
"""The nodes share one network here, so none can be cut off: `partition` has a test of its own."""
CPUS = {1: WORLD_SIZE + 1, 2: WORLD_SIZE - 1}
"""Of a node, by the number of nodes. The workers never fit on one of two."""


class Record:
    """The finished episodes of a soak, in a file that is there whole or not at all."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.outcomes: list[Outcome] = []
        self.path = path
        self._about = about

    def resume(self) -> str:
        """Takes over what is in the file; why that cannot be, or empty."""
        if not self.path.exists():
            return ""
        found = json.loads(self.path.read_text())
        for key in ("seed", "nodes", "kinds", "episode_faults"):
            if found[key] != self._about[key]:
                return f"{self.path} is of {key} {found[key]}, not {self._about[key]}"
        self.outcomes = [_outcome(one) for one in found["episodes"]]
        return ""

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        half = self.path.with_suffix(".tmp")
        half.parent.mkdir(parents=True, exist_ok=True)
        episodes = [asdict(one) for one in self.outcomes]
        half.write_text(json.dumps(self._about | {"episodes": episodes}, indent=1) + "\n")
        os.replace(half, self.path)


def _outcome(found: dict[str, Any]) -> Outcome:
    of = found["plan"] | {"faults": tuple(found["plan"]["faults"])}
    ways = [Way(**one) for one in found["ways"]]
    return Outcome(**(found | {"plan": Plan(**of), "ways": ways}))


def remaining(options: argparse.Namespace, done: int) -> Iterator[Plan]:
    """The episodes that are still to be run."""
    for number in range(done, math.ceil(options.faults / EPISODE_FAULTS)):
        count = min(EPISODE_FAULTS, options.faults - number * EPISODE_FAULTS)
        yield plan(options.seed, number, count, options.kinds, options.nodes)


def line(outcome: Outcome) -> str:
    of, ways = outcome.plan, outcome.ways
    worst = max((one.seconds for one in ways), default=0.0)
    redone = sum(one.steps_redone for one in ways)
    verdict = "; ".join(outcome.lost) or "nothing lost"
    return (
        f"episode {of.number}: stage {of.stage}, {of.steps} steps, {outcome.seconds:.0f} s, "
        f"{len(outcome.fired)} fired, {len(ways)} ways back (max {worst:.2f} s), "
        f"{redone} steps redone: {verdict}"
    )


def show(console: Console, outcomes: list[Outcome]) -> None:
    """By kind: how often it happened, and what the ways back took."""
    table = Table("fault", "fired", "repairs", "median s", "max s", "steps redone")
    for column in table.columns[1:]:
        column.justify = "right"
    happened = Counter(kind_of(text) for one in outcomes for text in one.fired)
    ways = [way for one in outcomes for way in one.ways]
    others = sorted({way.kind for way in ways} - set(FAULT_KINDS))
    for kind in [*(name for name in FAULT_KINDS if happened[name]), *others]:
        seconds = [way.seconds for way in ways if way.kind == kind]
        table.add_row(
            kind,
            str(happened[kind]),
            "-" if kind in CALM else str(len(seconds)),
            f"{median(seconds):.3f}" if seconds else "-",
            f"{max(seconds):.3f}" if seconds else "-",
            str(sum(way.steps_redone for way in ways if way.kind == kind)),
        )
    console.print(table)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--faults", type=int, default=100, help="in all")
    parser.add_argument("--seed", type=int, default=0, help="of the schedules, all of them")
    parser.add_argument("--nodes", type=int, default=1, choices=[*CPUS], help="of the cluster")
    parser.add_argument("--kinds", help=f"by default all: {', '.join(ON_SEVERAL)} (two nodes)")
    parser.add_argument(
        "--state", type=Path, metavar="PATH", help="the record; by default runs/soak-<seed>.json"
    )
    parser.add_argument("--keep", action="store_true", help="leave every episode's files")
    parser.add_argument("--resume", action="store_true", help="go on where the record ends")
    options = parser.parse_args(arguments)
    allowed = ON_ONE_NODE if options.nodes == 1 else ON_SEVERAL
    options.kinds = options.kinds.split(",") if options.kinds else [*allowed]
    unknown = [name for name in options.kinds if name not in allowed]
    if unknown:
        parser.error(f"unknown kinds {unknown}; allowed: {', '.join(allowed)}")
    if options.faults < 1:
        parser.error("at least one fault is needed")
    options.state = options.state or Path(f"runs/soak-{options.seed}.json")
    return options


def main(arguments: list[str]) -> int:
    options = parsed(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    about = describe_machine() | {
        "seed": options.seed,
        "nodes": options.nodes,
        "kinds": options.kinds,
        "episode_faults": EPISODE_FAULTS,
    }
    record = Record(options.state, about)
    if options.resume and (why := record.resume()):
        console.print(f"cannot resume: {why}", style="red")
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers inherit it
    with connect_to_cluster(options.nodes, CPUS[options.nodes]) as replace_lost_nodes:
        for of in remaining(options, len(record.outcomes)):
            folder = Path(tempfile.mkdtemp(prefix=f"soak-{of.number}-"))
            replace_lost_nodes()
            outcome = run(of, folder, replace_lost_nodes)
            record.add(outcome)
            console.print(line(outcome), style="red" if outcome.lost else None)
            if outcome.lost or options.keep:
                console.print(f"  its faults: {', '.join(of.faults)}; its files: {folder}")
            else:
                shutil.rmtree(folder)
    lost = sum(bool(one.lost) for one in record.outcomes)
    fired = sum(len(one.fired) for one in record.outcomes)
    console.print(format_machine(about))
    show(console, record.outcomes)
    verdict = f"something was lost in {lost} of them" if lost else "nothing lost"
    console.print(f"{fired} faults in {len(record.outcomes)} episodes: {verdict}")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
