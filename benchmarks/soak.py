"""Soak test: repeated jobs with random faults of every kind must lose nothing.

    python -m benchmarks.soak --faults 100 --seed 1
    python -m benchmarks.soak --faults 100 --seed 1 --resume

Jobs with three workers, or two to five on a stream, run one after another, each with a few faults:
of the fault language, and others that are inflicted from outside. Each job must succeed, every
fault must fire, the final weights must equal those of plain torch (float64, 1e-9 relative), and the
ledger must show every sample exactly once. Otherwise the exit code is 1.
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
from benchmarks.disruptions import DISRUPTIONS
from benchmarks.episode import Outcome, run
from benchmarks.machine import describe_machine, format_machine
from benchmarks.soak_control import FOLDER_VARIABLE
from benchmarks.soak_plan import OF_ROLE, Plan, fault_kind, kind_of, plan
from benchmarks.soak_submission import CPUS, NON_DISRUPTIVE, Recovery
from rayzero.workers.chaos.spec import FAULT_KINDS, ROLE_FAULT_KINDS
from tests.support.nccl_like.settings import VARIABLE, NcclLike

EPISODE_FAULTS = 5
UNUSED_KINDS = ("partition",)
"""The nodes share one network. It has a separate test."""
DESCRIPTIONS = {
    **{name: kind.description for name, kind in FAULT_KINDS.items() if name not in UNUSED_KINDS},
    **{name: kind.description for name, kind in DISRUPTIONS.items()},
    **{name + OF_ROLE: kind.description for name, kind in ROLE_FAULT_KINDS.items()},
}
ROLLOUT_KINDS = (
    *("kill", "stop", "hang", "kill_vault", "kill_starting", "kill_role", "stop_role"),
    *(name for name, kind in DISRUPTIONS.items() if "rollouts" in kind.only),
)
"""The default of jobs with rollouts: what concerns these, and takes seconds."""


def kinds_for(nodes: int, job: str = "") -> list[str]:
    """The kinds of faults that need no more than so many nodes, and that the job can have, which is
    one of "rollouts", or on a "stream"."""
    return [name for name in DESCRIPTIONS if _is_possible(name, nodes) and _fits(name, job)]


def _is_possible(name: str, nodes: int) -> bool:
    needs_head = name in DISRUPTIONS and DISRUPTIONS[name].needs_head
    return _nodes_needed(name) <= nodes and not (needs_head and nodes > 1)


def _fits(name: str, job: str) -> bool:
    only = DISRUPTIONS[name].only if name in DISRUPTIONS else ()
    return not (only and job not in only) and (job == "rollouts" or not name.endswith(OF_ROLE))


def why_not(name: str) -> str:
    """Why this machine cannot inflict faults of that kind; empty if it can."""
    return DISRUPTIONS[name].why_not() if name in DISRUPTIONS else ""


def _nodes_needed(name: str) -> int:
    if name in DISRUPTIONS:
        return DISRUPTIONS[name].min_nodes
    return 2 if fault_kind(name).target == "cluster" else 1


_DRAWN_FROM = "seed nodes kinds episode_faults rollouts stream controller_node".split()
"""The settings that a record must have to be continued."""


class Record:
    """The finished episodes of a soak, in a file that is replaced atomically."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.outcomes: list[Outcome] = []
        self.path = path
        self._settings = settings

    def resume(self) -> str:
        """Load the file. Returns the reason if its settings do not match, else an empty string."""
        if not self.path.exists():
            return ""
        saved = json.loads(self.path.read_text())
        for key in _DRAWN_FROM:
            if saved.get(key, False) != self._settings[key]:
                return f"{self.path} is of {key} {saved.get(key)}, not {self._settings[key]}"
        self.outcomes = [_parse_outcome(entry) for entry in saved["episodes"]]
        return ""

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        temporary = self.path.with_suffix(".tmp")
        temporary.parent.mkdir(parents=True, exist_ok=True)
        episodes = [asdict(outcome) for outcome in self.outcomes]
        temporary.write_text(json.dumps(self._settings | {"episodes": episodes}, indent=1) + "\n")
        os.replace(temporary, self.path)


def _parse_outcome(entry: dict[str, Any]) -> Outcome:
    episode = entry["plan"] | {"faults": tuple(entry["plan"]["faults"])}
    recoveries = [Recovery(**recovery) for recovery in entry["recoveries"]]
    return Outcome(**(entry | {"plan": Plan(**episode), "recoveries": recoveries}))


def remaining_episodes(options: argparse.Namespace, done: int) -> Iterator[Plan]:
    """Plans of the episodes after the first `done`."""
    for number in range(done, math.ceil(options.faults / options.job_faults)):
        count = min(options.job_faults, options.faults - number * options.job_faults)
        kinds, of_rollouts = options.kinds, options.rollouts
        yield plan(options.seed, number, count, kinds, options.nodes, of_rollouts, options.stream)


def format_outcome(outcome: Outcome) -> str:
    episode, recoveries = outcome.plan, outcome.recoveries
    longest_s = max((recovery.seconds for recovery in recoveries), default=0.0)
    redone = sum(recovery.steps_redone for recovery in recoveries)
    verdict = "; ".join(outcome.lost) or "nothing lost"
    return (
        f"episode {episode.number}: {_describe_stream(episode)}stage {episode.stage}, "
        f"{episode.steps} steps, "
        f"{outcome.seconds:.0f} s, {len(outcome.fired)} fired, {len(recoveries)} recoveries "
        f"(max {longest_s:.2f} s), {redone} steps redone, {outcome.resizes} resizes: {verdict}"
    )


def _describe_stream(episode: Plan) -> str:
    bad = " with bad samples" * episode.has_bad
    made = f"made in {episode.loader_processes} processes" if episode.loader_processes else ""
    text = f"{episode.stream}{bad} {made}".strip()
    return f"{text}, {episode.workers} ranks, " if episode.stream else ""


def show(console: Console, outcomes: list[Outcome]) -> None:
    """Print the number of faults and the recovery times by kind."""
    table = Table("fault", "fired", "repairs", "median s", "max s", "steps redone")
    for column in table.columns[1:]:
        column.justify = "right"
    fired = Counter(kind_of(text) for outcome in outcomes for text in outcome.fired)
    recoveries = [recovery for outcome in outcomes for recovery in outcome.recoveries]
    others = sorted({recovery.kind for recovery in recoveries} - set(DESCRIPTIONS))
    for kind in [*(name for name in DESCRIPTIONS if fired[name]), *others]:
        seconds = [r.seconds for r in recoveries if r.kind == kind]
        table.add_row(
            kind,
            str(fired[kind]),
            str(len(seconds)) if _needs_repair(kind) or seconds else "-",
            f"{median(seconds):.3f}" if seconds else "-",
            f"{max(seconds):.3f}" if seconds else "-",
            str(sum(r.steps_redone for r in recoveries if r.kind == kind)),
        )
    console.print(table)


def _needs_repair(kind: str) -> bool:
    if kind in DISRUPTIONS:
        return DISRUPTIONS[kind].needs_repair
    return kind not in NON_DISRUPTIVE and not kind.endswith(OF_ROLE)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description=__doc__,
        epilog=_list_kinds(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--faults", type=int, default=100, help="total number of faults")
    text = "faults of each job"
    parser.add_argument("--job-faults", type=int, default=EPISODE_FAULTS, metavar="N", help=text)
    parser.add_argument("--seed", type=int, default=0, help="random seed of all schedules")
    parser.add_argument(
        "--nodes", type=int, default=1, choices=[*CPUS], help="nodes of the cluster"
    )
    parser.add_argument(
        "--kinds", help="kinds of faults, separated by commas; default: all that can be inflicted"
    )
    parser.add_argument(
        "--state", type=Path, metavar="PATH", help="record file; default: runs/soak-<seed>.json"
    )
    text = "train on a device and a process group that behave as NCCL's (tests/support/nccl_like)"
    parser.add_argument("--nccl-like", action="store_true", help=text)
    text = "jobs that train on rollouts, with roles; by default fewer kinds of faults"
    parser.add_argument("--rollouts", action="store_true", help=text)
    text = "jobs on a stream: Parquet, JSON lines, tar, a mixture or an iterable; of 2 to 5 ranks"
    parser.add_argument("--stream", action="store_true", help=text)
    text = "a node for the jobs' processes, which so outlive the head; with one other node"
    parser.add_argument("--controller-node", action="store_true", help=text)
    parser.add_argument("--keep", action="store_true", help="keep the files of every episode")
    parser.add_argument("--resume", action="store_true", help="continue an existing record")
    options = parser.parse_args(arguments)
    job = "rollouts" if options.rollouts else "stream" * options.stream
    allowed = kinds_for(options.nodes, job)
    refused = {name: reason for name in allowed if (reason := why_not(name))}
    usual = ROLLOUT_KINDS if options.rollouts else allowed
    default = [name for name in allowed if name in usual and name not in refused]
    options.kinds = options.kinds.split(",") if options.kinds else default
    if unknown := [name for name in options.kinds if name not in allowed]:
        parser.error(f"unknown kinds {unknown}; allowed: {', '.join(allowed)}")
    if impossible := [f"{name}: {refused[name]}" for name in options.kinds if name in refused]:
        parser.error(f"this machine cannot inflict {'; '.join(impossible)}")
    options.refused = refused
    if options.controller_node:  # no other process is started while the old one's node lives
        options.kinds = [name for name in options.kinds if name != "fence_controller"]
        if options.nodes != 1:
            parser.error("--controller-node needs --nodes 1: the head of others is never lost")
    if options.stream and options.rollouts:
        parser.error("a job trains on rollouts or on a stream")
    if min(options.faults, options.job_faults) < 1:
        parser.error("at least one fault is required")
    options.state = options.state or Path(f"runs/soak-{options.seed}.json")
    return options


def _list_kinds() -> str:
    lines = [
        f"  {name:16} {text}{' (two nodes)' * (_nodes_needed(name) > 1)}"
        for name, text in DESCRIPTIONS.items()
    ]
    return "\n".join(["kinds of faults:", *lines])


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    settings = describe_machine() | {
        "seed": options.seed,
        "nodes": options.nodes,
        "kinds": options.kinds,
        "episode_faults": options.job_faults,
        "rollouts": options.rollouts,
        "stream": options.stream,
        "controller_node": options.controller_node,
    }
    record = Record(options.state, settings)
    if options.resume and (reason := record.resume()):
        console.print(f"cannot resume: {reason}", style="red")
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # inherited by the workers
    if options.nccl_like:
        os.environ.setdefault(VARIABLE, NcclLike().text())
    for name, reason in options.refused.items():
        console.print(f"without {name}: {reason}")
    control = tempfile.mkdtemp(prefix="soak-control-")
    os.environ[FOLDER_VARIABLE] = control  # inherited by the workers
    nodes, cpus = options.nodes, CPUS[options.nodes]
    with connect_to_cluster(nodes, cpus, options.controller_node) as cluster:
        for episode in remaining_episodes(options, len(record.outcomes)):
            folder = Path(tempfile.mkdtemp(prefix=f"soak-{episode.number}-"))
            cluster.replace_lost_nodes()
            outcome = run(episode, folder, options.nodes, cluster)
            record.add(outcome)
            console.print(format_outcome(outcome), style="red" if outcome.lost else None)
            if outcome.lost or options.keep:
                shutil.copytree(control, folder / "control")
                console.print(f"  faults: {', '.join(episode.faults)}; files: {folder}")
            else:
                shutil.rmtree(folder)
    shutil.rmtree(control)
    lost = sum(bool(outcome.lost) for outcome in record.outcomes)
    fired = sum(len(outcome.fired) for outcome in record.outcomes)
    resizes = sum(outcome.resizes for outcome in record.outcomes)
    console.print(format_machine(settings))
    show(console, record.outcomes)
    verdict = f"something was lost in {lost} of them" if lost else "nothing lost"
    console.print(
        f"{fired} faults in {len(record.outcomes)} episodes: {verdict}; {resizes} resizes"
    )
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
