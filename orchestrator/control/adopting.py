"""Goes on with a run that lost its controller, with its numbers, budgets and history."""

from __future__ import annotations

import time

from rayzero.orchestrator.control.checkpoints import Checkpoints
from rayzero.orchestrator.control.desk import Desk
from rayzero.orchestrator.control.faults import Faults
from rayzero.orchestrator.journal.adoption import budgeted
from rayzero.orchestrator.journal.past import Past
from rayzero.orchestrator.notices import Adopted
from rayzero.orchestrator.policies.membership import Wanted
from rayzero.orchestrator.repairs import Repairs
from rayzero.orchestrator.states import JobState


def take_over(
    desk: Desk, past: Past, faults: Faults, repairs: Repairs, checkpoints: Checkpoints
) -> float:
    """Before anything else is done; when the run began, by the controller's clock."""
    now_s, unix_s = desk.now_s(), time.time()
    desk.job = JobState(generation=past.generation)
    desk.progress.steps = past.step  # what is behind the checkpoint will count as done again
    checkpoints.written += past.written
    checkpoints.failed += past.failed
    repairs.resizes += past.resizes
    faults.record += budgeted(past, now_s, unix_s)
    repairs.repairs += past.repairs
    repairs.steps_redone += past.steps_redone
    if past.scaled is not None:
        desk.crew.wanted = Wanted(*past.scaled, desk.crew.wanted.spares)
    desk.see(Adopted(past.step, past.generation, unix_s - past.at_s))
    return now_s - (unix_s - past.began_at_s)
