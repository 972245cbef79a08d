"""The facts of a job's run, folded from its events, and the bus that folds and delivers them.

Status, metrics, page, summary and journal report the `JobFacts` of a run. Their JSON is the state
file of the journal, from which another controller continues the run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, TypeVar, get_args

from pydantic import FiniteFloat

from rayzero.engine.redact import redact_url
from rayzero.orchestrator import job_events
from rayzero.orchestrator.fact_entries import (
    CheckpointEntry,
    FaultEntry,
    GenerationEntry,
    RecoveryEntry,
    recovery_entry,
)
from rayzero.orchestrator.job_events import (
    CLIENT_EVENTS,
    FrequentEvent,
    JobEvent,
    JobWarning,
    RunBegun,
)
from rayzero.orchestrator.machine import FINAL_STATES, State
from rayzero.orchestrator.numbers import MAX_COUNT, Amount, Count, UnixTime
from rayzero.orchestrator.policies.failure import Fault, FaultCause
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.role_facts import RoleFacts, fold_role_event
from rayzero.workers.messages import LogLine

MAX_ENTRIES = 256
"""Number of newest entries that each shown list keeps."""

RESERVED_GENERATIONS = 1000
"""How many generation numbers a process of a run reserves at a time."""

MAX_FAULTS = 1000
"""Number of newest faults that are kept for budgets."""

T = TypeVar("T")


@dataclass(frozen=True)
class Counters:
    """Totals of the run, in which recomputed steps count again. A step that finished but was never
    reported, because no rank survived, counts with the values of the next reported step.

    Args:
        loss: of the last step, if it is finite.
        seconds: wall time by cause; set only in the journal's state.
        last_step: the last step that this process finished.
    """

    loss: FiniteFloat | None = None
    seconds: Mapping[str, Amount] = field(default_factory=dict)
    done: Count = 0
    tokens: float = 0.0
    samples: float = 0.0
    skipped: float = 0.0
    nonfinite: Count = 0
    last_step: Count | None = None

    def after(self, record: StepRecord) -> Counters:
        loss, gauges = record.loss, record.gauges
        count = 1 if self.last_step is None else max(1, record.step - self.last_step)
        return replace(
            self,
            loss=loss if loss is not None and isfinite(loss) else None,
            done=self.done + count,
            tokens=self.tokens + record.tokens * count,
            samples=self.samples + gauges.get("step_samples", 0.0) * count,
            skipped=self.skipped + gauges.get("skipped", 0.0),
            nonfinite=self.nonfinite + (loss is not None and not isfinite(loss)),
            last_step=record.step,
        )


@dataclass(frozen=True)
class JobFacts:
    """The facts of a job's run, which may have had several processes. Times are Unix times.

    Args:
        began_at_s, last_at_s: times of the run's first and last event.
        spec: the spec of the run's last process, without secrets.
        run: the id of the run's last process.
        working_dir: the submitter's working directory.
        by_value: the training function was submitted as an object, not by name.
        source: a hash of the code of the last process; empty if unknown.
        step: number of finished steps; a recovery may go back.
        best_step: the largest `step` so far.
        reserved_generations: no generation of the run has a greater number.
        start_s: how long the first workers took at the last start.
        scaled_limits: (minimum, maximum) of workers, if they were changed while the job ran.
        faults: the newest `MAX_FAULTS`; `fatal`: the fault that ended the run.
        end_state: empty until the run has ended.
        waiting_for: resources that the first workers wait for, and who holds them.
        generations, seen_faults, recoveries, checkpoints: the newest `MAX_ENTRIES` of each, oldest
            first; without checkpoints that were removed.
        lost_ranks: lost ranks of the newest generation.
        roles: the facts of each role, by its name.
    """

    began_at_s: UnixTime = 0.0
    last_at_s: UnixTime = 0.0
    spec: dict[str, Any] = field(default_factory=dict)
    run: str = ""
    working_dir: str = ""
    by_value: bool = False
    source: str = ""
    state: State = State.PENDING
    step: Count = 0
    best_step: Count = 0
    generation: Count = 0
    reserved_generations: Count = 0
    start_s: Amount = 0.0
    world_size: Count = 0
    scaled_limits: tuple[Count, Count] | None = None
    counters: Counters = Counters()
    faults: tuple[Fault, ...] = ()
    fatal: Fault | None = None
    faults_by_cause: Mapping[str, Count] = field(default_factory=dict)
    repairs_by_cause: Mapping[str, Count] = field(default_factory=dict)
    resizes: Count = 0
    steps_redone: Count = 0
    checkpoint_step: Count | None = None
    checkpoint_at_s: UnixTime = 0.0
    checkpoints_written: Count = 0
    checkpoints_failed: Count = 0
    adoptions: Count = 0
    end_state: str = ""
    error: str = ""
    waiting_for: str = ""
    generations: tuple[GenerationEntry, ...] = ()
    seen_faults: tuple[FaultEntry, ...] = ()
    recoveries: tuple[RecoveryEntry, ...] = ()
    checkpoints: tuple[CheckpointEntry, ...] = ()
    lost_ranks: tuple[int, ...] = ()
    roles: Mapping[str, RoleFacts] = field(default_factory=dict)

    @property
    def steps(self) -> int | None:
        """The step at which the run ends; None without a limit."""
        steps = self.spec.get("steps")
        if isinstance(steps, int) and not isinstance(steps, bool) and 0 <= steps <= MAX_COUNT:
            return steps
        return None

    @property
    def total_repairs(self) -> int:
        return sum(self.repairs_by_cause.values())

    def role(self, name: str) -> RoleFacts:
        """Returns the facts of a role, also of one that has not begun."""
        return self.roles.get(name, RoleFacts())

    def faults_on_clock(self, now_s: float, unix_s: float) -> list[Fault]:
        """Returns the faults, with their times on this controller's clock. None is in the future,
        even if the machine's time was set back."""
        return [replace(fault, at_s=now_s - max(0.0, unix_s - fault.at_s)) for fault in self.faults]

    def apply(self, event: JobEvent | FrequentEvent, at_s: float) -> JobFacts:
        """Returns the facts after one more event."""
        if isinstance(event, RunBegun):
            return self._begin(event, at_s)
        changes = self._changes(event, at_s)
        if "step" in changes:
            changes["best_step"] = max(self.best_step, changes["step"])
        return replace(self, last_at_s=at_s, **changes)

    def _begin(self, event: RunBegun, at_s: float) -> JobFacts:
        """Returns the facts of a run that begins. The ranks of an adopted run ended with their
        controller."""
        new = JobFacts(at_s, working_dir=event.working_dir, by_value=event.by_value)
        past = self if event.adopted else new
        reserved = max(past.generation, past.reserved_generations) + RESERVED_GENERATIONS
        return replace(
            past,
            last_at_s=at_s,
            spec=event.spec,
            run=event.run,
            source=event.source,
            state=State.PENDING,
            reserved_generations=reserved,
            world_size=0,
            counters=replace(past.counters, last_step=None),
            fatal=None,
            adoptions=past.adoptions + event.adopted,
            end_state="",
            error="",
            generations=past._generations_with(at_s=past.last_at_s, world_size=0),
            roles={name: role.with_workers(0, past.last_at_s) for name, role in past.roles.items()},
        )

    def _changes(self, event: JobEvent | FrequentEvent, at_s: float) -> dict[str, Any]:
        match event:
            case job_events.StateEntered():
                return self._enter(event, at_s)
            case StepRecord():
                return {"step": event.step, "counters": self.counters.after(event)}
            case job_events.Reattached():
                return self._reattach(event, at_s)
            case job_events.Resumed():
                return {"step": max(self.step, event.step)}
            case job_events.Rewound():
                return {"step": event.step, "steps_redone": self.steps_redone + event.steps_redone}
            case job_events.FaultRecorded():
                return self._record(event, at_s)
            case job_events.FaultDetected():
                text = redact_url(event.text)
                seen = FaultEntry(at_s, event.cause, event.rank, event.step, text)
                faults = {"seen_faults": _longer(self.seen_faults, seen)}
                return faults | self._lose_rank(event.rank, event.cause, at_s)
            case job_events.Repaired(cause):
                recoveries = _longer(self.recoveries, recovery_entry(event, at_s))
                repairs = _plus_one(self.repairs_by_cause, cause)
                return {"repairs_by_cause": repairs, "recoveries": recoveries}
            case job_events.Resized():
                recoveries = _longer(self.recoveries, recovery_entry(event, at_s))
                return {"resizes": self.resizes + 1, "recoveries": recoveries}
            case job_events.Checkpointed(step):
                entry = CheckpointEntry(at_s, step, event.nbytes, event.seconds)
                return {
                    "checkpoint_step": step,
                    "checkpoint_at_s": at_s,
                    "checkpoints_written": self.checkpoints_written + 1,
                    "step": max(self.step, step),
                    "checkpoints": _longer(self.checkpoints, entry),
                }
            case job_events.CheckpointFailed():
                return {"checkpoints_failed": self.checkpoints_failed + 1}
            case job_events.CheckpointsPruned(steps):
                return {"checkpoints": tuple(c for c in self.checkpoints if c.step not in steps)}
            case job_events.FolderRemoved():
                return {"checkpoint_step": None, "checkpoints": ()}
            case job_events.LimitsChanged():
                return {"scaled_limits": (event.min_workers, event.max_workers)}
            case (
                job_events.RoleWorkerReady()
                | job_events.RoleWorkerEnded()
                | job_events.RoleFault()
                | job_events.RoleLimitsChanged()
            ):
                return {"roles": fold_role_event(self.roles, event, at_s)}
            case job_events.NumbersReserved():
                return {"reserved_generations": max(self.reserved_generations, event.last)}
            case job_events.WorkersReady() if event.start_s:
                return {"start_s": event.start_s}
            case job_events.ResourcesAwaited():
                return {"waiting_for": event.text}
            case job_events.RunEnded():
                return {"end_state": event.state, "error": redact_url(event.error)}
        return {}

    def _enter(self, event: job_events.StateEntered, at_s: float) -> dict[str, Any]:
        changes: dict[str, Any] = {
            "state": event.state,
            "generation": max(self.generation, event.generation),
            "world_size": event.world_size,
            "step": event.step,
        }
        if event.state in FINAL_STATES:
            changes["end_state"] = str(event.state)
        if event.state is State.RUNNING:
            began = GenerationEntry(at_s, event.generation, event.world_size)
            changes |= {"generations": _longer(self.generations, began), "lost_ranks": ()}
        return changes

    def _reattach(self, event: job_events.Reattached, at_s: float) -> dict[str, Any]:
        """Takes back the end of the ranks that `_begin` assumed. Steps after the journal's newest
        step count with the first step that is reported now."""
        has_ended = bool(self.generations) and not self.generations[-1].world_size
        return {
            "step": max(self.step, event.step),
            "counters": replace(self.counters, last_step=self.step or None),
            "generations": self.generations[:-1] if has_ended else self.generations,
            "recoveries": _longer(self.recoveries, recovery_entry(event, at_s)),
            "roles": {
                name: role.with_outliving(event.roles.get(name, 0), at_s)
                for name, role in self.roles.items()
            },
        }

    def _record(self, event: job_events.FaultRecorded, at_s: float) -> dict[str, Any]:
        detail = redact_url(event.fault.detail.partition("\n")[0])
        fault = replace(event.fault, at_s=at_s, detail=detail, traceback="")
        if event.is_fatal:
            return {"fatal": fault}
        return {
            "faults": (*self.faults, fault)[-MAX_FAULTS:],
            "faults_by_cause": _plus_one(self.faults_by_cause, fault.cause),
        }

    def _lose_rank(self, rank: int | None, cause: str, at_s: float) -> dict[str, Any]:
        """Counts a rank as lost, except after a failed collective, which does not mean that its
        rank is lost."""
        if rank is None or cause == FaultCause.COLLECTIVE or rank in self.lost_ranks:
            return {}
        left = self.generations[-1].world_size - 1 if self.generations else 0
        return {
            "lost_ranks": (*self.lost_ranks, rank),
            "generations": self._generations_with(at_s=at_s, world_size=max(0, left)),
        }

    def _generations_with(self, **changes: Any) -> tuple[GenerationEntry, ...]:
        """Returns the list with one more entry: the newest generation after these changes."""
        if not self.generations:
            return ()
        return _longer(self.generations, replace(self.generations[-1], **changes))


def _longer(entries: tuple[T, ...], entry: T) -> tuple[T, ...]:
    return (*entries, entry)[-MAX_ENTRIES:]


def _plus_one(counts: Mapping[str, int], cause: str) -> Mapping[str, int]:
    return dict(Counter(counts) + Counter([str(cause)]))


_NO_FACTS = frozenset({*get_args(FrequentEvent), LogLine})
"""Event types that change no facts, and come thousands of times a second."""


class EventBus:
    """Folds each event into the facts, and delivers it to the observers of its type, in the order
    of their subscription.

    Used from one event loop. Handlers must not block, and must not raise.

    Args:
        facts: the facts of the lost run that this run adopts.
        unix: returns the Unix time of an event.
    """

    def __init__(
        self, facts: JobFacts | None = None, unix: Callable[[], float] = time.time
    ) -> None:
        self.facts = facts or JobFacts(unix(), unix())
        self._unix = unix
        self._handlers: dict[type[JobEvent | FrequentEvent], tuple[Callable[[Any], None], ...]] = {}

    def subscribe(
        self,
        handler: Callable[[Any], None],
        types: Iterable[type[JobEvent | FrequentEvent]] = CLIENT_EVENTS,
    ) -> None:
        for event_type in types:
            self._handlers[event_type] = (*self._handlers.get(event_type, ()), handler)

    def emit(self, event: JobEvent | FrequentEvent) -> None:
        if type(event) not in _NO_FACTS:
            self.facts = self.facts.apply(event, round(self._unix(), 3))
        for handler in self._handlers.get(type(event), ()):
            handler(event)

    def warn(self, text: str) -> None:
        self.emit(JobWarning(text))
