"""`rayzero chaos`: faults for a running job, the words for them, and random ones for a job file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import yaml

from rayzero.orchestrator.cli.asking import ask
from rayzero.orchestrator.cli.codes import with_exit_code
from rayzero.orchestrator.wishes import Inject
from rayzero.workers.faults import KINDS, PHASES, example, parse, random_schedule, usage


@with_exit_code
def inject(name: str, faults: Sequence[str], address: str | None, as_json: bool) -> int:
    """Asks the job and prints what it scheduled; returns the process's exit code."""
    for text in faults:
        parse(text, step=1)  # what is no fault in any job needs none to be found
    answer = ask(name, address, "grant", Inject(tuple(faults)))
    print(json.dumps({"job": name, "scheduled": answer.splitlines()}) if as_json else answer)
    return 0


def list_words(as_json: bool) -> int:
    """Prints the fault language."""
    if as_json:
        print(json.dumps([_word(name) for name in KINDS]))
        return 0
    for name, kind in KINDS.items():
        print(f"{usage(name)}\n    {kind.does}\n    {example(name)}")
    print(f"\nphases: {', '.join(PHASES)}")
    print("how: flip, cut, remove")
    print("rank, node: from 0, in the order of ranks; step: from 1, or the first chance after it")
    return 0


@with_exit_code
def print_random(count: int, seed: int, ranks: int, steps: int, as_json: bool) -> int:
    """Prints a schedule for a job file."""
    faults = [str(fault) for fault in random_schedule(seed, count, ranks, steps)]
    schedule = {"faults": faults}
    print(json.dumps(schedule) if as_json else yaml.safe_dump(schedule, width=1000).rstrip())
    return 0


def _word(name: str) -> dict[str, Any]:
    kind = KINDS[name]
    return {
        "word": name,
        "where": kind.where,
        "does": kind.does,
        "required": kind.required,
        "defaults": dict(kind.defaults),
        "example": str(example(name)),
    }
