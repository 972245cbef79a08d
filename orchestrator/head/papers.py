"""What a job's process writes down behind the controller: the journal, and a log."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rayzero.engine.masking import masked
from rayzero.orchestrator.cli.plain import PlainLines
from rayzero.orchestrator.head.feed import Feed
from rayzero.orchestrator.journal.behind import Behind
from rayzero.orchestrator.journal.chronicle import Chronicle
from rayzero.orchestrator.journal.segments import Segments, every_s
from rayzero.orchestrator.notices import Notice
from rayzero.orchestrator.plan import JobPlan

LOG_MAX_BYTES = 256 * 2**20
"""A log that has grown so big becomes `job.log.1`, and a new one is begun."""
_LOG_EVERY_S = 0.2
_PART_BYTES = 256 * 1024


def log_path(output_dir: Path) -> Path:
    return output_dir / "logs" / "job.log"


def read_log(output_dir: Path, offset: int) -> bytes:
    """Some of the log from a byte on; nothing at its end, or where there is none."""
    try:
        with log_path(output_dir).open("rb") as file:
            file.seek(offset)
            return file.read(_PART_BYTES)
    except FileNotFoundError:
        return b""


def without_credentials(notice: Notice) -> Notice:
    """The same, for everybody's eyes: URLs in it without their credentials."""
    texts = {
        one.name: masked(text)
        for one in fields(notice)
        if isinstance(text := getattr(notice, one.name), str) and "://" in text
    }
    return replace(notice, **texts) if texts else notice  # type: ignore[arg-type]


class Papers:
    """An Observer that shows everything to the feed, and writes it down. Owns two threads.

    Args:
        tell: shows a warning; called in other threads.
    """

    def __init__(self, plan: JobPlan, feed: Feed, tell: Callable[[str], None]) -> None:
        self._feed = feed
        self._path = log_path(plan.output_dir)
        self._log = Behind("the job's log", self._write, _LOG_EVERY_S, tell)
        segments = Segments(plan.archive)
        self._journal = Behind("the journal", segments.write, every_s(plan.archive), tell)
        self._chronicle = Chronicle(self._journal.put)
        self._lines = PlainLines(self._log.put)
        self.note = self._chronicle.note

    def count(self, counted: Callable[[], Mapping[str, Any]]) -> None:
        """Where the journal finds what the job's metrics have counted."""
        self._chronicle.counted = counted

    def see(self, notice: Notice) -> None:
        notice = without_credentials(notice)
        self._feed.see(notice)
        self._chronicle.see(notice)
        self._lines.see(notice)

    def close(self, limit_s: float) -> bool:
        """Whether all was written in time. May block for so long."""
        written = self._journal.close(limit_s)
        self._log.close(1.0)
        return written

    def _write(self, lines: Sequence[str]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists() and self._path.stat().st_size > LOG_MAX_BYTES:
            os.replace(self._path, self._path.with_suffix(".log.1"))
        with self._path.open("a", encoding="utf-8", errors="replace") as file:
            file.writelines(f"{masked(line)}\n" for line in lines)
