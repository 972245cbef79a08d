"""Snapshots out of what `rayzero top --json` prints in another cluster, shown as they come."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import rich.console
from rich.live import Live

from rayzero.orchestrator.top.board import board, line
from rayzero.orchestrator.top.source import Snapshot, checked

Show = Callable[[Snapshot], None]


class Snapshots:
    """Takes text in any pieces, and shows each whole line that is a snapshot.

    Attributes:
        rest: the other lines, such as errors and Ray's own; the newest ones.
    """

    def __init__(self, show: Show, where: str) -> None:
        self._show = show
        self._where = where
        self._open = ""
        self.rest: list[str] = []

    def take(self, text: str) -> None:
        """
        Raises:
            ConfigError: it is a snapshot that cannot be read here.
        """
        *whole, self._open = (self._open + text).split("\n")
        for one in whole:
            value = _value(one)
            if value is not None:
                self._show(checked(value, self._where))
            elif one.strip():
                self.rest = [*self.rest[-50:], one]


def _value(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) and "format" in value else None


@contextmanager
def shown(as_json: bool, once: bool, out: TextIO | None = None) -> Iterator[Show]:
    """How snapshots are shown: JSON lines, a live board, or lines for a file."""
    out = out or sys.stdout
    if as_json or not out.isatty():
        words = json.dumps if as_json else line
        yield lambda now: print(words(now), file=out, flush=True)
        return
    terminal = rich.console.Console(file=out)
    if once:
        yield lambda now: terminal.print(board(now))
        return
    with Live(console=terminal, auto_refresh=False, vertical_overflow="crop") as live:
        yield lambda now: live.update(board(now), refresh=True)
