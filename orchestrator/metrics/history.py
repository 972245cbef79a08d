"""The history of a job, for its page and `rayzero top`. Every list is bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from rayzero.orchestrator import job_events
from rayzero.orchestrator.journal.run_history import RunHistory
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.metrics.curves import CurveSet
from rayzero.orchestrator.policies.failure import FaultCause, describe_fault
from rayzero.orchestrator.progress import StepRecord

MAX_HISTORY_ENTRIES = 256
"""Maximum length of each list; the oldest entries are dropped."""

Entry = dict[str, Any]


class DisplayHistory:
    """Entries as JSON values, oldest first; times are Unix seconds."""

    def __init__(self) -> None:
        self.curves = CurveSet()
        self.generations: deque[Entry] = deque(maxlen=MAX_HISTORY_ENTRIES)
        """One entry where a generation begins, and one where it loses a rank: with those left."""
        self.faults: deque[Entry] = deque(maxlen=MAX_HISTORY_ENTRIES)
        self.recoveries: deque[Entry] = deque(maxlen=MAX_HISTORY_ENTRIES)
        """Repairs and resizes."""
        self.checkpoints: deque[Entry] = deque(maxlen=MAX_HISTORY_ENTRIES)
        """Without those that were removed since."""
        self.waiting_for = ""
        """Resources that the first workers wait for, and who holds them."""
        self._lost_ranks: set[int] = set()

    def on_event(self, event: job_events.JobEvent, unix_s: float, began_s: float) -> None:
        match event:
            case job_events.ResourcesAwaited():
                self.waiting_for = event.text
            case StepRecord():
                self.curves.add_step(event, unix_s - began_s)
            case job_events.StateEntered() if event.state is State.RUNNING:
                self._begin_generation({"at_s": unix_s, **_generation_entry(vars(event))})
            case job_events.FaultDetected():
                entry = _fault_entry(unix_s, event.cause, event.rank, event.step, event.text)
                self.faults.append(entry)
                self._lose_rank(entry)
            case job_events.Repaired() | job_events.Resized():
                kind = "repaired" if isinstance(event, job_events.Repaired) else "resized"
                fields = {**vars(event), "kind": kind, "total_s": event.total_s}
                self.recoveries.append({"at_s": unix_s, **_recovery_entry(fields)})
            case job_events.Checkpointed():
                self.checkpoints.append({"at_s": unix_s, **_checkpoint_entry(vars(event))})
            case job_events.CheckpointsPruned():
                kept = [item for item in self.checkpoints if item["step"] not in event.steps]
                self.checkpoints = deque(kept, MAX_HISTORY_ENTRIES)

    def restore(self, past: RunHistory) -> None:
        """Adds the entries of a run's journal, which has no curves. Its ranks ended with its
        controller."""
        began = _parse_entries(past, "moved", _generation_entry)
        faults = [
            _fault_entry(it.at_s, it.cause, it.rank, it.step, describe_fault(it))
            for it in past.faults
        ]
        # Of the same moment, the fault is that of the generation before.
        for entry in sorted([*faults, *began], key=lambda entry: float(entry["at_s"])):
            if "cause" in entry:
                self.faults.append(entry)
                self._lose_rank(entry)
            else:
                self._begin_generation(entry)
        if self.generations:
            self.generations.append(
                self.generations[-1] | {"at_s": past.last_at_s, "world_size": 0}
            )
        recoveries = [
            *_parse_entries(past, "repaired", _recovery_entry),
            *_parse_entries(past, "resized", _recovery_entry),
        ]
        self.recoveries.extend(sorted(recoveries, key=lambda entry: float(entry["at_s"])))
        self.checkpoints.extend(_parse_entries(past, "checkpoint", _checkpoint_entry))

    def _begin_generation(self, entry: Entry) -> None:
        self._lost_ranks.clear()
        self.generations.append(entry)

    def _lose_rank(self, fault: Entry) -> None:
        """A failed collective is not the loss of its rank."""
        rank = fault["rank"]
        if rank is None or fault["cause"] == FaultCause.COLLECTIVE or rank in self._lost_ranks:
            return
        self._lost_ranks.add(rank)
        if self.generations:
            newest = self.generations[-1]
            left = max(0, newest["world_size"] - 1)
            self.generations.append(newest | {"at_s": fault["at_s"], "world_size": left})


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
    """Makes an entry from the fields of an event, or of its line in the journal, as the functions
    below."""
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
