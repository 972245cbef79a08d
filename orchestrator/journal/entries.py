"""Events as entries of the journal's list, and a run's facts as its state: JSON, without secrets.

An entry has `at_s` (Unix time), `kind`, and the fields of that kind. Unknown kinds and entries of a
later version are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import chain
from math import isfinite
from operator import itemgetter
from typing import Any

from pydantic import TypeAdapter

from rayzero.engine.redact import redact_document
from rayzero.orchestrator import job_events
from rayzero.orchestrator.facts import Counters, EventBus, JobFacts
from rayzero.orchestrator.job_events import FaultDetected, FaultRecorded, JobEvent, RunBegun
from rayzero.orchestrator.machine import FINAL_STATES
from rayzero.orchestrator.policies.failure import Fault, describe_fault
from rayzero.orchestrator.progress import StepRecord

FORMAT = 2
_KINDS: Mapping[str, type[JobEvent]] = {
    "begun": RunBegun,
    "moved": job_events.StateEntered,
    "fault": FaultRecorded,
    "picked": job_events.Rewound,
    "scaled": job_events.LimitsChanged,
    "repaired": job_events.Repaired,
    "resized": job_events.Resized,
    "checkpointfailed": job_events.CheckpointFailed,
    "checkpoint": job_events.Checkpointed,
    "pruned": job_events.CheckpointsPruned,
    "reserved": job_events.NumbersReserved,
    "removed": job_events.FolderRemoved,
    "reattached": job_events.Reattached,
    "ended": job_events.RunEnded,
}
_KIND_OF = {event_type: kind for kind, event_type in _KINDS.items()}
_FIELD_NAMES = {"trigger": "event", "min_workers": "least", "max_workers": "most"}
_EVENT_FIELDS = {name: attribute for attribute, name in _FIELD_NAMES.items()}
_DAMAGES = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)

JOURNALED = tuple(_KIND_OF)

DEFAULT_STEP_INTERVAL_S = 5.0
"""Seconds between two writes of the number of finished steps, which changes too often to be written
each time."""


def entry_of(event: JobEvent, at_s: float) -> dict[str, Any] | None:
    """Returns the entry of an event of a type in `JOURNALED`; None for a fatal fault, which the
    entry of the end reports."""
    value: Any = event
    if isinstance(event, FaultRecorded):
        if event.is_fatal:
            return None
        value = replace(event.fault, detail=event.fault.detail.partition("\n")[0])
    left_out = ("at_s", "traceback", "spec")
    items = {_FIELD_NAMES.get(k, k): v for k, v in asdict(value).items() if k not in left_out}
    if isinstance(event, job_events.Repaired | job_events.Resized):
        items["total_s"] = event.total_s
    return {"at_s": at_s, "kind": _KIND_OF[type(event)], **redact_document(items)}


def event_of(entry: Mapping[str, Any]) -> JobEvent:
    """Returns the event of an entry.

    Raises:
        LookupError, TypeError, ValueError: the entry is of a later version, or damaged.
    """
    if entry["kind"] == "step":
        return job_events.Rewound(int(entry["step"]), 0)
    items = {_EVENT_FIELDS.get(name, name): value for name, value in entry.items()}
    event_type: Any = _KINDS[entry["kind"]]
    if event_type is FaultRecorded:
        return FaultRecorded(_reader(Fault).validate_python(items))
    return _reader(event_type).validate_python(items)  # type: ignore[no-any-return]


@cache
def _reader(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def fold_entries(entries: Iterable[Mapping[str, Any]]) -> JobFacts | None:
    """Returns the facts of the last run in these entries, which are of a release without a state
    file; None if there is none."""
    facts = JobFacts()
    for entry in entries:
        with suppress(*_DAMAGES):
            at_s, event = float(entry["at_s"]), event_of(entry)
            if isinstance(event, RunBegun) and not facts.run:
                event = replace(event, adopted=False)
            facts = facts.apply(event, at_s)
            if isinstance(event, FaultRecorded):
                facts = facts.apply(_detected(event.fault), at_s)
            if counted := entry.get("counted"):
                facts = replace(facts, counters=_reader(Counters).validate_python(counted))
    return parse_facts(facts_json(facts)) if facts.run else None


def _detected(fault: Fault) -> FaultDetected:
    """Returns the event of the detection of a fault: earlier releases wrote only that the fault
    counts."""
    text = describe_fault(fault)
    return FaultDetected(fault.cause, fault.worker, fault.rank, fault.step, text)


def facts_json(facts: JobFacts) -> bytes:
    """Returns the content of the journal's state file."""
    document = {item.name: getattr(facts, item.name) for item in fields(facts)}
    return json.dumps({"format": FORMAT, **document}, default=asdict).encode()


def parse_facts(content: bytes) -> JobFacts | None:
    """Returns the facts in a state file; None for what is not the state of a run."""
    try:
        document = json.loads(content)
        if "entries" in document:
            document |= _lists_of_earlier_release(document)
        facts: JobFacts = _reader(JobFacts).validate_python(document)
        known = facts.began_at_s > 0 and facts.end_state in ("", *FINAL_STATES)
        return facts if known and all(isfinite(fault.at_s) for fault in facts.faults) else None
    except _DAMAGES:
        return None


def _lists_of_earlier_release(document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the lists of a state in which an earlier release stored them as entries. A fault at
    the moment when a generation begins is of the generation before."""
    faults = ({**fault, "kind": "fault"} for fault in document.get("fault_entries", ()))
    lists = fold_entries(
        [
            {
                "kind": "begun",
                "at_s": 1.0,
                "run": "1",
                "spec": {},
                "working_dir": "",
                "by_value": 0,
            },
            *sorted(chain(faults, *document["entries"].values()), key=itemgetter("at_s")),
        ]
    )
    names = ("faults", "faults_by_cause", "generations", "seen_faults", "recoveries", "checkpoints")
    return {name: getattr(lists, name) for name in names}


@dataclass(frozen=True)
class JournalUpdate:
    """The run's facts after an event, and the line for the list of events, if it has one."""

    facts: JobFacts
    line: str = ""


class JournalWriter:
    """An observer of a job's events, from its construction on. Opens no file.

    Args:
        put: takes an update; must not block.
        seconds: returns the wall time by cause, as far as it is counted.
        step_interval_s: seconds between two updates of the number of finished steps.
    """

    def __init__(
        self,
        put: Callable[[JournalUpdate], None],
        events: EventBus,
        seconds: Callable[[], Mapping[str, float]] = dict,
        step_interval_s: float = DEFAULT_STEP_INTERVAL_S,
    ) -> None:
        self._put = put
        self._events = events
        self._seconds = seconds
        self._step_interval_s = step_interval_s
        self._next_step_s = 0.0
        events.subscribe(self._on_event, JOURNALED)
        events.subscribe(self._on_step, (StepRecord,))

    def _on_event(self, event: JobEvent) -> None:
        if (entry := entry_of(event, self._events.facts.last_at_s)) is not None:
            self._put(JournalUpdate(self._facts(), json.dumps(entry, default=str)))

    def _on_step(self, _: StepRecord) -> None:
        if (at_s := self._events.facts.last_at_s) >= self._next_step_s:
            self._next_step_s = at_s + self._step_interval_s
            self._put(JournalUpdate(self._facts()))

    def _facts(self) -> JobFacts:
        facts, seconds = self._events.facts, self._seconds()
        return replace(
            facts, counters=replace(facts.counters, seconds=seconds or facts.counters.seconds)
        )
