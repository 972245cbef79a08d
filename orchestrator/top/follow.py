"""Follow live or through another cluster.

Asks for a job's snapshot again and again, and shows it.

Snapshots out of what `rayzero top --json` prints in another cluster, shown as they come.
"""

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
"""How long a job may be out of contact before lines for a file end."""


def show_snapshot(source: SnapshotSource, as_json: bool, out: TextIO | None = None) -> None:
    """The job at this moment.

    Raises:
        SnapshotUnavailableError: nothing answers.
    """
    now, out = source(), out or sys.stdout
    if as_json:
        print(json.dumps(now), file=out, flush=True)
    elif out.isatty():
        rich.console.Console(file=out).print(render_board(now))
    else:
        print(snapshot_line(now), file=out, flush=True)


def follow_job(source: SnapshotSource, as_json: bool, out: TextIO | None = None) -> None:
    """The job until its end, or until Ctrl-C.

    Raises:
        SnapshotUnavailableError: nothing answers at first, or, without a terminal, for a minute.
    """
    out = out or sys.stdout
    if out.isatty() and not as_json:
        _follow_live(source, rich.console.Console(file=out))
    else:
        _follow_lines(source, (lambda now: json.dumps(now)) if as_json else snapshot_line, out)


def _follow_live(source: SnapshotSource, terminal: rich.console.Console) -> None:
    now, heard_at_s = source(), monotonic()
    with Live(
        render_board(now), console=terminal, auto_refresh=False, vertical_overflow="crop"
    ) as live:
        while not has_ended(now):
            sleep(REFRESH_S)
            try:
                now, heard_at_s = source(), monotonic()
                trouble = None
            except SnapshotUnavailableError as error:
                trouble = f"no contact for {monotonic() - heard_at_s:.0f} s: {error}"
            live.update(render_board(now, trouble), refresh=True)


def _follow_lines(
    source: SnapshotSource,
    words: Callable[[Snapshot], str],
    out: TextIO,
    clock: Callable[[], float] = monotonic,
    wait: Callable[[float], None] = sleep,
) -> None:
    now, heard_at_s = source(), clock()
    print(words(now), file=out, flush=True)
    while not has_ended(now):
        wait(LINE_INTERVAL_S)
        try:
            now, heard_at_s = source(), clock()
            print(words(now), file=out, flush=True)
        except SnapshotUnavailableError:
            if clock() - heard_at_s > LOST_CONTACT_S:
                raise


ShowSnapshot = Callable[[Snapshot], None]


class SnapshotParser:
    """Takes text in any pieces, and shows each whole line that is a snapshot.

    Attributes:
        rest: the other lines, such as errors and Ray's own; the newest ones.
    """

    def __init__(self, show: ShowSnapshot, where: str) -> None:
        self._show = show
        self._where = where
        self._partial_line = ""
        self.other_lines: list[str] = []

    def feed(self, text: str) -> None:
        """
        Raises:
            ConfigError: it is a snapshot that cannot be read here.
        """
        *whole, self._partial_line = (self._partial_line + text).split("\n")
        for one in whole:
            value = _decode_snapshot(one)
            if value is not None:
                self._show(check_snapshot(value, self._where))
            elif one.strip():
                self.other_lines = [*self.other_lines[-50:], one]


def _decode_snapshot(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) and "format" in value else None


@contextmanager
def open_display(as_json: bool, once: bool, out: TextIO | None = None) -> Iterator[ShowSnapshot]:
    """How snapshots are shown: JSON lines, a live board, or lines for a file."""
    out = out or sys.stdout
    if as_json or not out.isatty():
        words = json.dumps if as_json else snapshot_line
        yield lambda now: print(words(now), file=out, flush=True)
        return
    terminal = rich.console.Console(file=out)
    if once:
        yield lambda now: terminal.print(render_board(now))
        return
    with Live(console=terminal, auto_refresh=False, vertical_overflow="crop") as live:
        yield lambda now: live.update(render_board(now), refresh=True)
