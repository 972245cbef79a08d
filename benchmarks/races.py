"""The whole of the race detector: `python -m benchmarks.races [--part cases|mutants]`.

Trains the engine on virtual accelerators (`tests/support/virtual_device`). No GPU is used, and no
time of one is measured.

    cases     every configuration of `tests/support/races/cases.py`: races and early frees
    mutants   the product with each wait left out once: is it noticed?

Exits with 1 if a case is not clean, or an unjustified mutant survives.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from tests.support.races.cases import Case, all_cases, mutant_cases
from tests.support.races.mutants import Verdict, judge, reached_functions
from tests.support.races.running import Findings, run_case
from tests.support.races.survivors import JUSTIFIED
from tests.support.races.waits import Wait, all_waits

_reached: dict[tuple[str, str], list[Findings]] = {}


def _start(mutate: bool) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if mutate:
        _reached.update(reached_functions(mutant_cases()))


def _judge(wait: Wait) -> Verdict:
    return judge(wait, _reached)


def _in_parallel(
    work: Callable[[Any], Any], items: Sequence[Any], processes: int, *, mutate: bool = False
) -> Iterator[Any]:
    """Results in order, with progress on stderr."""
    started_s = shown_s = time.monotonic()
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _start, (mutate,))
    with pool:
        for number, result in enumerate(pool.map(work, items), 1):
            if time.monotonic() - shown_s > 10 or number == len(items):
                shown_s = time.monotonic()
                print(f"{number} of {len(items)}, {shown_s - started_s:.0f} s", file=sys.stderr)
            yield result


def run_cases(cases: Sequence[Case], processes: int) -> dict[str, Any]:
    """Races and early frees over all cases."""
    started_s = time.monotonic()
    results: list[Findings] = list(_in_parallel(run_case, cases, processes))
    syncs: Counter[str] = Counter()
    for found in results:
        syncs.update(found.syncs_per_step.keys())
        if not found.clean:
            print(found)
    by_offload: dict[str, Counter[str]] = {}
    for found in results:
        row = by_offload.setdefault(found.case.offload, Counter())
        row.update(cases=1, operators=found.operators, not_clean=not found.clean)
        row["races"] += len(found.races)
        row["early frees"] += len(found.early_frees)
    return {
        "cases": len(results),
        "not_clean": sum(not found.clean for found in results),
        "races": sum(len(found.races) for found in results),
        "early_frees": sum(len(found.early_frees) for found in results),
        "operators": sum(found.operators for found in results),
        "seconds": round(time.monotonic() - started_s, 1),
        "by_offload": {name: dict(row) for name, row in by_offload.items()},
        "host_waits_in_cases": dict(syncs.most_common()),
    }


def run_mutants(waits: Sequence[Wait], processes: int) -> dict[str, Any]:
    """Which mutants are noticed."""
    started_s = time.monotonic()
    verdicts: list[Verdict] = []
    for it in _in_parallel(_judge, waits, processes, mutate=True):
        verdicts.append(it)
        if it.how is None:
            justified = JUSTIFIED.get(it.wait.key, "NOT JUSTIFIED")
            place = f"{it.wait.key} (line {it.wait.line})"
            print(f"survives {it.tried} cases: {place}: {justified}", flush=True)
    survivors = [it for it in verdicts if it.how is None]
    killed = len(verdicts) - len(survivors)
    return {
        "mutants": len(verdicts),
        "killed": killed,
        "killed_of_reachable_share": round(
            killed / max(1, sum(it.wait.key not in JUSTIFIED for it in verdicts)), 3
        ),
        "by": dict(Counter(it.how for it in verdicts if it.how)),
        "not_justified": [it.wait.key for it in survivors if it.wait.key not in JUSTIFIED],
        "justified": [it.wait.key for it in survivors if it.wait.key in JUSTIFIED],
        "seconds": round(time.monotonic() - started_s, 1),
    }


def _table(name: str, result: dict[str, Any]) -> Iterable[str]:
    yield f"{name}: " + ", ".join(
        f"{key} {value}" for key, value in result.items() if not isinstance(value, dict | list)
    )
    for key, value in result.items():
        if isinstance(value, dict) and value:
            yield f"  {key}:"
            yield from (f"    {inner}: {it}" for inner, it in value.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", choices=("cases", "mutants"), action="append")
    parser.add_argument("--seed", type=int, default=0, help="of the covering arrays")
    parser.add_argument("--limit", type=int, help="at most as many cases or mutants")
    parser.add_argument("--only", metavar="FILE", help="mutants of the files whose path has this")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    parts, results = options.part or ["cases", "mutants"], {}
    if "cases" in parts:
        results["cases"] = run_cases(all_cases(options.seed)[: options.limit], options.processes)
    if "mutants" in parts:
        waits = [wait for wait in all_waits() if (options.only or "") in wait.file]
        results["mutants"] = run_mutants(waits[: options.limit], options.processes)
    for name, result in results.items():
        print("\n".join(_table(name, result)))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return int(any(it.get("not_clean") or it.get("not_justified") for it in results.values()))


if __name__ == "__main__":
    sys.exit(main())
