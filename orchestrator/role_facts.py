"""The facts of a job's roles, folded from its events. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rayzero.engine.redact import redact_url
from rayzero.orchestrator import job_events
from rayzero.orchestrator.numbers import Count, UnixTime
from rayzero.orchestrator.policies.failure import Fault, FaultCause
from rayzero.workers.messages import WorkerInfo

MAX_ROLE_ENTRIES = 256
"""Number of newest entries that each list of a role keeps."""


@dataclass(frozen=True)
class RoleSize:
    """The number of a role's workers since `at_s`."""

    at_s: UnixTime
    workers: Count


@dataclass(frozen=True)
class RoleFaultEntry:
    """A fault of the worker with this number."""

    at_s: UnixTime
    cause: str
    number: Count
    text: str


@dataclass(frozen=True)
class RoleFacts:
    """The facts of one role.

    Args:
        workers: number of workers whose function runs now.
        faults: number of faults by cause.
        scaled: (minimum, maximum) of workers, if they were changed while the job ran.
        returned: the numbers of the workers whose function has returned.
        sizes, seen_faults: the newest `MAX_ROLE_ENTRIES` of each, oldest first; `seen_faults` has
            also all faults within the budget's window.
    """

    workers: Count = 0
    faults: Mapping[str, Count] = field(default_factory=dict)
    scaled: tuple[Count, Count] | None = None
    returned: tuple[Count, ...] = ()
    sizes: tuple[RoleSize, ...] = ()
    seen_faults: tuple[RoleFaultEntry, ...] = ()

    @property
    def finished(self) -> int:
        """Number of workers whose function has returned."""
        return len(self.returned)

    def faults_on_clock(self, now_s: float, unix_s: float) -> list[Fault]:
        """Returns the kept faults, for budgets: with times on this controller's clock, and workers
        without a node."""
        nowhere = WorkerInfo(-1, "", "", "", 0)
        return [
            Fault(
                FaultCause(fault.cause),
                nowhere,
                fault.number,
                0,
                fault.text,
                now_s - max(0.0, unix_s - fault.at_s),
            )
            for fault in self.seen_faults
            if fault.cause in set(FaultCause)
        ]

    def with_fault(self, fault: RoleFaultEntry, window_s: float) -> RoleFacts:
        """Returns the facts after one more fault."""
        counts = Counter(self.faults) + Counter([fault.cause])
        seen = (*self.seen_faults, fault)
        older, kept = seen[:-MAX_ROLE_ENTRIES], seen[-MAX_ROLE_ENTRIES:]
        in_window = tuple(entry for entry in older if entry.at_s > fault.at_s - window_s)
        return replace(self, faults=dict(counts), seen_faults=(*in_window, *kept))

    def with_workers(self, workers: int, at_s: float) -> RoleFacts:
        """Returns the facts with another number of workers from `at_s` on."""
        if workers == self.workers:
            return self
        sizes = (*self.sizes, RoleSize(at_s, workers))[-MAX_ROLE_ENTRIES:]
        return replace(self, workers=workers, sizes=sizes)

    def with_outliving(self, workers: int, at_s: float) -> RoleFacts:
        """Returns the facts if so many workers have outlived their controller: takes back that all
        of them ended with it."""
        before = self.sizes[:-1]
        if self.workers or not before:
            return self.with_workers(workers, at_s)
        facts = replace(self, workers=before[-1].workers, sizes=before)
        return facts.with_workers(workers, at_s)


RoleEvent = (
    job_events.RoleWorkerReady
    | job_events.RoleWorkerEnded
    | job_events.RoleFault
    | job_events.RoleLimitsChanged
)


def fold_role_event(
    roles: Mapping[str, RoleFacts], event: RoleEvent, at_s: float
) -> dict[str, RoleFacts]:
    """Returns the facts by role after one more event."""
    facts = roles.get(event.role, RoleFacts())
    match event:
        case job_events.RoleWorkerReady():
            facts = facts.with_workers(event.workers, at_s)
            returned = tuple(number for number in facts.returned if number != event.number)
            facts = replace(facts, returned=returned)
        case job_events.RoleWorkerEnded():
            facts = facts.with_workers(event.workers, at_s)
            if event.has_returned:
                facts = replace(facts, returned=(*facts.returned, event.number))
        case job_events.RoleFault(cause=cause):
            text = redact_url(event.text.partition("\n")[0])
            fault = RoleFaultEntry(at_s, str(cause), event.number, text)
            facts = facts.with_workers(event.workers, at_s).with_fault(fault, event.window_s)
        case job_events.RoleLimitsChanged():
            facts = replace(facts, scaled=(event.min_workers, event.max_workers))
    return {**roles, event.role: facts}
