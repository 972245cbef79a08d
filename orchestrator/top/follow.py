"""Asks for a job's snapshot again and again, and shows it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from time import monotonic, sleep
from typing import TextIO

import rich.console
from rich.live import Live

from rayzero.orchestrator.top.board import board, is_over, line
from rayzero.orchestrator.top.source import NoContactError, Snapshot, Source

EVERY_S = 1.0
LINE_EVERY_S = 5.0
LOST_S = 60.0
"""How long a job may be out of contact before lines for a file end."""


def show_once(source: Source, as_json: bool, out: TextIO | None = None) -> None:
    """The job at this moment.

    Raises:
        NoContactError: nothing answers.
    """
    now, out = source(), out or sys.stdout
    if as_json:
        print(json.dumps(now), file=out, flush=True)
    elif out.isatty():
        rich.console.Console(file=out).print(board(now))
    else:
        print(line(now), file=out, flush=True)


def follow(source: Source, as_json: bool, out: TextIO | None = None) -> None:
    """The job until its end, or until Ctrl-C.

    Raises:
        NoContactError: nothing answers at first, or, without a terminal, for a minute.
    """
    out = out or sys.stdout
    if out.isatty() and not as_json:
        _live(source, rich.console.Console(file=out))
    else:
        _lines(source, (lambda now: json.dumps(now)) if as_json else line, out)


def _live(source: Source, terminal: rich.console.Console) -> None:
    now, heard_at_s = source(), monotonic()
    with Live(board(now), console=terminal, auto_refresh=False, vertical_overflow="crop") as live:
        while not is_over(now):
            sleep(EVERY_S)
            try:
                now, heard_at_s = source(), monotonic()
                trouble = None
            except NoContactError as error:
                trouble = f"no contact for {monotonic() - heard_at_s:.0f} s: {error}"
            live.update(board(now, trouble), refresh=True)


def _lines(
    source: Source,
    words: Callable[[Snapshot], str],
    out: TextIO,
    clock: Callable[[], float] = monotonic,
    wait: Callable[[float], None] = sleep,
) -> None:
    now, heard_at_s = source(), clock()
    print(words(now), file=out, flush=True)
    while not is_over(now):
        wait(LINE_EVERY_S)
        try:
            now, heard_at_s = source(), clock()
            print(words(now), file=out, flush=True)
        except NoContactError:
            if clock() - heard_at_s > LOST_S:
                raise
