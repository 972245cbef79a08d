"""What was counted of a run, for its journal, and a tally that goes on from there. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from rayzero.orchestrator.journal.adoption import budgeted
from rayzero.orchestrator.journal.past import TURNS, Past
from rayzero.orchestrator.metrics.history import History
from rayzero.orchestrator.metrics.tally import Now, Tally
from rayzero.orchestrator.policies.failure import describe

_STEPS = ("done", "tokens", "samples", "skipped", "nonfinite")


def counted(tally: Tally, now: Now) -> dict[str, Any]:
    """What a journal does not tell line by line."""
    seconds = tally.times(now).seconds
    return {
        "seconds": {str(why): round(spent, 3) for why, spent in seconds.items() if spent},
        **{name: getattr(tally.steps, name) for name in _STEPS},
    }


def carry_on(tally: Tally, past: Past, now: Now) -> None:
    """Makes a new tally that of a lost run, at its adoption."""
    ago_s = max(0.0, now.unix_s - past.began_at_s)
    tally.began = Now(now.s - ago_s, past.began_at_s)
    tally.account.go_on(past.counted.get("seconds", {}), past.best_step, ago_s)
    for name in _STEPS:
        value = past.counted.get(name, 0)
        setattr(tally.steps, name, type(getattr(tally.steps, name))(value))
    tally.steps.step = past.step
    tally.stood_at = past.step
    tally.generation = past.generation
    if past.scaled is not None:
        tally.limits = past.scaled
    for fault in budgeted(past, now.s, now.unix_s):
        tally.troubles.judged(fault)
    tally.troubles.repairs.update(past.repaired)
    tally.troubles.resizes = past.resizes
    tally.troubles.steps_redone = past.steps_redone
    tally.checkpoints.written = past.written
    tally.checkpoints.failed = past.failed
    if past.checkpoint_step is not None:
        tally.checkpoints.found(past.checkpoint_step, past.checkpoint_at_s)
    _recall(tally.history, past)


def _recall(history: History, past: Past) -> None:
    """The lists of a page, as far as the journal has them: it knows no losses."""
    for fault in past.faults[-TURNS:]:
        where = {"rank": fault.rank, "step": fault.step, "text": describe(fault)}
        history.faults.append({"at_s": fault.at_s, "cause": str(fault.cause), **where})
    history.generations.extend(_entries(past, "moved", _generation))
    ways = [*_entries(past, "repaired", _way), *_entries(past, "resized", _way)]
    history.ways.extend(sorted(ways, key=lambda one: float(one["at_s"])))
    history.checkpoints.extend(_entries(past, "checkpoint", _checkpoint))


def _entries(
    past: Past, kind: str, entry: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Of those lines that have what is shown; a later version may have written others."""
    found = []
    for line in past.turns.get(kind, ()):
        with suppress(KeyError, TypeError, ValueError):
            found.append({"at_s": float(line["at_s"]), **entry(line)})
    return found


def _generation(line: Mapping[str, Any]) -> dict[str, Any]:
    return {"generation": int(line["generation"]), "world_size": int(line["world_size"])}


def _way(line: Mapping[str, Any]) -> dict[str, Any]:
    repair = line["kind"] == "repaired"
    return {
        "kind": "repair" if repair else "resize",
        "cause": str(line["cause" if repair else "reason"]),
        "step": int(line["step"]),
        "steps_redone": int(line["steps_redone"]) if repair else 0,
        "world_size_before": int(line["world_size_before"]),
        "world_size": int(line["world_size"]),
        "total_s": float(line["total_s"]),
        "seconds": {str(part): float(spent) for part, spent in dict(line["seconds"]).items()},
    }


def _checkpoint(line: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "step": int(line["step"]),
        "bytes": int(line["nbytes"]),
        "seconds": float(line["seconds"]),
    }
