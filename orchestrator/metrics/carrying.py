"""What was counted of a run, for its journal, and a tally that goes on from there. Pure."""

from __future__ import annotations

from typing import Any

from rayzero.orchestrator.journal.adoption import budgeted
from rayzero.orchestrator.journal.past import Past
from rayzero.orchestrator.metrics.tally import Now, Tally

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
