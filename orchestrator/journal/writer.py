"""Turns a job's events into journal entries and the state of its run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from rayzero.engine.redact import redact_document
from rayzero.orchestrator import job_events
from rayzero.orchestrator.journal.files import JournalFiles, JournalUpdate
from rayzero.orchestrator.journal.run_history import RunHistory, apply_entry
from rayzero.orchestrator.progress import StepRecord

DEFAULT_STEP_INTERVAL_S = 5.0
"""Finished steps are too frequent to be written one by one."""


class JournalWriter:
    """An observer of a job's events. Used from one event loop; opens no file.

    Args:
        put: takes an update; must not block.
        history: of the run that is adopted.
        now_s: Unix time.
        step_interval_s: between two updates of the number of finished steps.
    """

    def __init__(
        self,
        put: Callable[[JournalUpdate], None],
        history: RunHistory | None = None,
        now_s: Callable[[], float] = time.time,
        step_interval_s: float = DEFAULT_STEP_INTERVAL_S,
    ) -> None:
        self.history = history
        self.counter_source: Callable[[], Mapping[str, Any]] = dict
        """The counters of the job's metrics; a run that adopts this one continues them."""
        self._put = put
        self._now_s = now_s
        self._step_interval_s = step_interval_s
        self._next_step_s = 0.0

    def append(self, kind: str, **fields: Any) -> None:
        """Adds one entry; secrets in it are redacted."""
        if kind in ("moved", "step") and (counters := self.counter_source()):
            fields["counted"] = counters
        entry = {"at_s": round(self._now_s(), 3), "kind": kind, **redact_document(fields)}
        self.history = apply_entry(self.history, entry)
        if self.history is not None:
            listed = {key: entry[key] for key in entry if key not in ("counted", "spec")}
            line = "" if kind == "step" else json.dumps(listed, default=str)
            self._put(JournalUpdate(self.history, line))

    def on_event(self, event: job_events.JobEvent) -> None:
        match event:
            case StepRecord(step=step):
                if self._now_s() >= self._next_step_s:
                    self._next_step_s = self._now_s() + self._step_interval_s
                    self.append("step", step=step)
            case job_events.StateEntered():
                fields = asdict(event)
                self.append("moved", event=fields.pop("trigger"), **fields)
            case job_events.FaultRecorded(fault, is_fatal=False):
                fields = asdict(fault) | {"detail": fault.detail.partition("\n")[0]}
                del fields["at_s"], fields["traceback"]
                self.append("fault", **fields)
            case job_events.Rewound():
                self.append("picked", **asdict(event))
            case job_events.LimitsChanged():
                self.append("scaled", least=event.min_workers, most=event.max_workers)
            case job_events.Repaired() | job_events.Resized():
                self.append(type(event).__name__.lower(), **asdict(event), total_s=event.total_s)
            case job_events.CheckpointFailed():
                self.append("checkpointfailed", **asdict(event))
            case job_events.Checkpointed():
                self.append("checkpoint", **asdict(event))
            case job_events.CheckpointsPruned(steps):
                self.append("pruned", steps=list(steps))
            case job_events.NumbersReserved(last):
                self.append("reserved", last=last)


def write_end(job_folder: str, history: RunHistory, state: str, error: str) -> None:
    """Ends a lost run in its journal. May block; the caller holds the folder's lease.

    Raises:
        StoreError, OSError: nothing was changed.
    """
    updates: list[JournalUpdate] = []
    JournalWriter(updates.append, history).append("ended", state=state, error=error)
    JournalFiles(job_folder).write(updates)
