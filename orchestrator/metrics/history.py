"""What a job went through, for its page and `rayzero top`. Every list is bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from rayzero.orchestrator import job_events
from rayzero.orchestrator.journal.run_history import RunHistory
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.policies.failure import describe_fault
from rayzero.orchestrator.progress import StepRecord

MAX_POINTS = 512
"""Maximum number of points of a curve."""
MAX_HISTORY_ENTRIES = 256
"""Maximum length of each list; the oldest entries are dropped."""

Entry = dict[str, Any]


class BoundedCurve:
    """A curve that drops every other point when it has too many."""

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._max_points = max_points
        self._points: list[tuple[int, float]] = []
        self._stride = 1
        self._count = 0
        self._last: tuple[int, float] | None = None

    def add(self, x: int, y: float) -> None:
        """Replaces the points from x on, if there are any."""
        while self._points and self._points[-1][0] >= x:
            self._points.pop()
        self._last = (x, y)
        if self._count % self._stride == 0:
            self._points.append(self._last)
            if len(self._points) > self._max_points:
                self._points = self._points[::2]
                self._stride *= 2
        self._count += 1

    def points(self) -> list[tuple[int, float]]:
        """In the order they were added, always with the newest one."""
        if self._last is None or (self._points and self._points[-1] == self._last):
            return list(self._points)
        return [*self._points, self._last]


class DisplayHistory:
    """Entries as JSON values, oldest first; times are Unix seconds."""

    def __init__(self) -> None:
        self.loss = BoundedCurve()
        self.generations: deque[Entry] = deque(maxlen=MAX_HISTORY_ENTRIES)
        self.faults: deque[Entry] = deque(maxlen=MAX_HISTORY_ENTRIES)
        self.recoveries: deque[Entry] = deque(maxlen=MAX_HISTORY_ENTRIES)
        """Repairs and resizes."""
        self.checkpoints: deque[Entry] = deque(maxlen=MAX_HISTORY_ENTRIES)

    def on_event(self, event: job_events.JobEvent, unix_s: float) -> None:
        match event:
            case StepRecord() if event.loss is not None:
                self.loss.add(event.step, event.loss)
            case job_events.StateEntered() if event.state is State.RUNNING:
                self.generations.append({"at_s": unix_s, **_generation_entry(vars(event))})
            case job_events.FaultDetected():
                entry = _fault_entry(unix_s, event.cause, event.rank, event.step, event.text)
                self.faults.append(entry)
            case job_events.Repaired() | job_events.Resized():
                kind = "repaired" if isinstance(event, job_events.Repaired) else "resized"
                fields = {**vars(event), "kind": kind, "total_s": event.total_s}
                self.recoveries.append({"at_s": unix_s, **_recovery_entry(fields)})
            case job_events.Checkpointed():
                self.checkpoints.append({"at_s": unix_s, **_checkpoint_entry(vars(event))})

    def restore(self, past: RunHistory) -> None:
        """Adds the entries of a run's journal, which has no losses."""
        for fault in past.faults:
            text = describe_fault(fault)
            self.faults.append(_fault_entry(fault.at_s, fault.cause, fault.rank, fault.step, text))
        self.generations.extend(_parse_entries(past, "moved", _generation_entry))
        recoveries = [
            *_parse_entries(past, "repaired", _recovery_entry),
            *_parse_entries(past, "resized", _recovery_entry),
        ]
        self.recoveries.extend(sorted(recoveries, key=lambda entry: float(entry["at_s"])))
        self.checkpoints.extend(_parse_entries(past, "checkpoint", _checkpoint_entry))


def _parse_entries(
    past: RunHistory, kind: str, parse: Callable[[Mapping[str, Any]], Entry]
) -> list[Entry]:
    """Skips lines of the journal without the required fields: another version may write others."""
    entries = []
    for line in past.entries.get(kind, ()):
        with suppress(KeyError, TypeError, ValueError):
            entries.append({"at_s": float(line["at_s"]), **parse(line)})
    return entries


def _fault_entry(unix_s: float, cause: str, rank: int | None, step: int, text: str) -> Entry:
    return {"at_s": unix_s, "cause": cause, "rank": rank, "step": step, "text": text}


def _generation_entry(fields: Mapping[str, Any]) -> Entry:
    """From the fields of an event, or of its line in the journal, as the functions below."""
    return {"generation": int(fields["generation"]), "world_size": int(fields["world_size"])}


def _recovery_entry(fields: Mapping[str, Any]) -> Entry:
    is_repair = fields["kind"] == "repaired"
    return {
        "kind": "repair" if is_repair else "resize",
        "cause": str(fields["cause" if is_repair else "reason"]),
        "step": int(fields["step"]),
        "steps_redone": int(fields["steps_redone"]) if is_repair else 0,
        "world_size_before": int(fields["world_size_before"]),
        "world_size": int(fields["world_size"]),
        "total_s": float(fields["total_s"]),
        "seconds": {str(phase): float(took_s) for phase, took_s in dict(fields["seconds"]).items()},
    }


def _checkpoint_entry(fields: Mapping[str, Any]) -> Entry:
    return {
        "step": int(fields["step"]),
        "bytes": int(fields["nbytes"]),
        "seconds": float(fields["seconds"]),
    }
