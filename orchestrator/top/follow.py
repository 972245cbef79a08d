"""Displays of a job: its polled snapshot, or the output of `rayzero top --json` elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any, TextIO

import rich.console
from rich.live import Live

from rayzero.orchestrator.top.board import has_ended, render_board, snapshot_line
from rayzero.orchestrator.top.source import (
    Snapshot,
    SnapshotSource,
    SnapshotUnavailableError,
    check_snapshot,
)

REFRESH_S = 1.0
LINE_INTERVAL_S = 5.0
LOST_CONTACT_S = 60.0
"""Without a terminal, `follow_job` fails after this time without a response."""


def show_snapshot(source: SnapshotSource, as_json: bool, out: TextIO | None = None) -> None:
    """Prints the job's current snapshot.

    Raises:
        SnapshotUnavailableError: no response.
    """
    now, out = source(), out or sys.stdout
    if as_json:
        print(json.dumps(now), file=out, flush=True)
    elif out.isatty():
        rich.console.Console(file=out).print(render_board(now))
    else:
        print(snapshot_line(now), file=out, flush=True)


def follow_job(source: SnapshotSource, as_json: bool, out: TextIO | None = None) -> None:
    """Shows the job until it ends, or until Ctrl-C.

    Raises:
        SnapshotUnavailableError: no first response, or, without a terminal, none for a minute.
    """
    out = out or sys.stdout
    if out.isatty() and not as_json:
        _follow_live(source, rich.console.Console(file=out))
    else:
        _follow_lines(source, json.dumps if as_json else snapshot_line, out)


def _follow_live(source: SnapshotSource, terminal: rich.console.Console) -> None:
    now, updated_s = source(), monotonic()
    with Live(
        render_board(now), console=terminal, auto_refresh=False, vertical_overflow="crop"
    ) as live:
        while not has_ended(now):
            sleep(REFRESH_S)
            try:
                now, updated_s = source(), monotonic()
                error_text = None
            except SnapshotUnavailableError as error:
                error_text = f"no response for {monotonic() - updated_s:.0f} s: {error}"
            live.update(render_board(now, error_text), refresh=True)


def _follow_lines(
    source: SnapshotSource,
    to_line: Callable[[Snapshot], str],
    out: TextIO,
    clock: Callable[[], float] = monotonic,
    wait: Callable[[float], None] = sleep,
) -> None:
    now, updated_s = source(), clock()
    print(to_line(now), file=out, flush=True)
    while not has_ended(now):
        wait(LINE_INTERVAL_S)
        try:
            now, updated_s = source(), clock()
            print(to_line(now), file=out, flush=True)
        except SnapshotUnavailableError:
            if clock() - updated_s > LOST_CONTACT_S:
                raise


ShowSnapshot = Callable[[Snapshot], None]


class SnapshotParser:
    """Shows each line of a text stream that is a snapshot.

    Attributes:
        other_lines: the newest of the other lines, such as errors and Ray's log lines.
    """

    def __init__(self, show: ShowSnapshot, where: str) -> None:
        self._show = show
        self._where = where
        self._partial_line = ""
        self.other_lines: list[str] = []

    def feed(self, text: str) -> None:
        """Adds a piece of the stream, which may end within a line.

        Raises:
            ConfigError: a snapshot has an unsupported format.
        """
        *lines, self._partial_line = (self._partial_line + text).split("\n")
        for line in lines:
            value = _decode_snapshot(line)
            if value is not None:
                self._show(check_snapshot(value, self._where))
            elif line.strip():
                self.other_lines = [*self.other_lines[-50:], line]


def _decode_snapshot(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) and "format" in value else None


@contextmanager
def open_display(as_json: bool, once: bool, out: TextIO | None = None) -> Iterator[ShowSnapshot]:
    """Yields a function that shows a snapshot: as JSON, on a live board, or as a text line."""
    out = out or sys.stdout
    if as_json or not out.isatty():
        to_line = json.dumps if as_json else snapshot_line
        yield lambda now: print(to_line(now), file=out, flush=True)
        return
    terminal = rich.console.Console(file=out)
    if once:
        yield lambda now: terminal.print(render_board(now))
        return
    with Live(console=terminal, auto_refresh=False, vertical_overflow="crop") as live:
        yield lambda now: live.update(render_board(now), refresh=True)
