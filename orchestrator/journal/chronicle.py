"""From what happens to a job to the lines of its journal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from rayzero.engine.masking import redacted
from rayzero.orchestrator.notices import (
    Checkpointed,
    CheckpointFailed,
    Notice,
    Repaired,
    Resized,
)
from rayzero.orchestrator.progress import StepRecord

STEP_EVERY_S = 5.0
"""Steps are too many to be told each: one now and then says how far the run is at least."""
_WITH_COUNTS = ("moved", "step")
"""Lines that say what was counted by then."""


class Chronicle:
    """An Observer, and the controller's `Note`. Used from one event loop.

    Args:
        put: takes a line.
        now_s: Unix time.
        step_every_s: between two steps that are told.
    """

    def __init__(
        self,
        put: Callable[[str], None],
        now_s: Callable[[], float] = time.time,
        step_every_s: float = STEP_EVERY_S,
    ) -> None:
        self._put = put
        self._now_s = now_s
        self._step_every_s = step_every_s
        self._step_due_s = 0.0
        self.counted: Callable[[], Mapping[str, Any]] = dict
        """What the job's metrics have counted; a run that adopts this one goes on from there."""

    def note(self, kind: str, **fields: Any) -> None:
        """One line; secrets in it are taken out."""
        if kind in _WITH_COUNTS and (counted := self.counted()):
            fields["counted"] = counted
        line = {"at_s": round(self._now_s(), 3), "kind": kind, **redacted(fields)}
        self._put(json.dumps(line, default=str))

    def see(self, notice: Notice) -> None:
        match notice:
            case StepRecord(step=step):
                if self._now_s() >= self._step_due_s:
                    self._step_due_s = self._now_s() + self._step_every_s
                    self.note("step", step=step)
            case Repaired() | Resized():
                self.note(_kind(notice), **asdict(notice), total_s=notice.total_s)
            case CheckpointFailed():
                self.note(_kind(notice), **asdict(notice))
            case Checkpointed():
                self.note("checkpoint", **asdict(notice))


def _kind(notice: Notice) -> str:
    return type(notice).__name__.lower()
