"""Turns a job's events into journal entries and the state of its run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace

from rayzero.orchestrator.facts import EventBus, JobFacts
from rayzero.orchestrator.job_events import JobEvent, RunEnded
from rayzero.orchestrator.journal.entries import JOURNALED, entry_of
from rayzero.orchestrator.journal.files import JournalFiles, JournalUpdate
from rayzero.orchestrator.progress import StepRecord

DEFAULT_STEP_INTERVAL_S = 5.0
"""Finished steps are too frequent to be written one by one."""


class JournalWriter:
    """An observer of a job's events, from its construction on. Opens no file.

    Args:
        put: takes an update; must not block.
        seconds: the wall time by cause, as far as it is counted.
        step_interval_s: between two updates of the number of finished steps.
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


def write_end(job_folder: str, facts: JobFacts, state: str, error: str) -> None:
    """Ends a lost run in its journal. May block; the caller holds the folder's lease.

    Raises:
        StoreError, OSError: nothing was changed.
    """
    updates: list[JournalUpdate] = []
    events = EventBus(facts)
    JournalWriter(updates.append, events)
    events.emit(RunEnded(state, error))
    JournalFiles(job_folder).write(updates)
