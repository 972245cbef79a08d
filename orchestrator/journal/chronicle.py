"""From what happens to a job to the lines of its journal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rayzero.orchestrator.journal.secrets import redacted
from rayzero.orchestrator.notices import Checkpointed, Notice, Repaired, Resized
from rayzero.orchestrator.progress import StepRecord

STEP_EVERY_S = 5.0
"""Steps are too many to be told each: one now and then says how far the run is at least."""


class Chronicle:
    """An Observer, and the controller's `Note`. Used from one event loop.

    Args:
        put: takes a line.
        now_s: Unix time.
    """

    def __init__(self, put: Callable[[str], None], now_s: Callable[[], float] = time.time) -> None:
        self._put = put
        self._now_s = now_s
        self._step_due_s = 0.0

    def note(self, kind: str, **fields: Any) -> None:
        """One line; secrets in it are taken out."""
        line = {"at_s": round(self._now_s(), 3), "kind": kind, **redacted(fields)}
        self._put(json.dumps(line, default=str))

    def see(self, notice: Notice) -> None:
        match notice:
            case StepRecord(step=step):
                if self._now_s() >= self._step_due_s:
                    self._step_due_s = self._now_s() + STEP_EVERY_S
                    self.note("step", step=step)
            case Repaired() | Resized():
                kind = type(notice).__name__.lower()
                self.note(kind, **asdict(notice), total_s=notice.total_s)
            case Checkpointed():
                self.note("checkpoint", **asdict(notice))
