"""The facts of a job's roles, folded from its events. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rayzero.orchestrator import job_events
from rayzero.orchestrator.numbers import Count


@dataclass(frozen=True)
class RoleFacts:
    """The facts of one role: its `workers` now, its faults by cause, and the least and the most
    workers, if they were changed while the job ran (`scaled`)."""

    workers: Count = 0
    faults: Mapping[str, Count] = field(default_factory=dict)
    scaled: tuple[Count, Count] | None = None


def fold_role_event(
    roles: Mapping[str, RoleFacts],
    event: job_events.RoleWorkerReady
    | job_events.RoleWorkerEnded
    | job_events.RoleFault
    | job_events.RoleLimitsChanged,
) -> dict[str, RoleFacts]:
    """The facts by role after one more event."""
    facts = roles.get(event.role, RoleFacts())
    match event:
        case job_events.RoleWorkerReady() | job_events.RoleWorkerEnded():
            facts = replace(facts, workers=event.workers)
        case job_events.RoleFault(cause=cause):
            faults = dict(Counter(facts.faults) + Counter([str(cause)]))
            facts = replace(facts, workers=event.workers, faults=faults)
        case job_events.RoleLimitsChanged():
            facts = replace(facts, scaled=(event.min_workers, event.max_workers))
    return {**roles, event.role: facts}
