"""A line tee: what the process prints reaches the controller, and its own file as before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOBase
from threading import Lock
from typing import TextIO

Sink = Callable[[str, str], None]  # (stream's name, one line without its end)


class LineTee(TextIOBase):
    """A text stream that writes through to `target` and hands each finished line to `sink`.

    Of a line that was redrawn with carriage returns, as progress bars do, the last state counts.
    """

    def __init__(self, target: TextIO, name: str, sink: Sink) -> None:
        super().__init__()
        self._target = target
        self._name = name
        self._sink = sink
        self._partial = ""
        self._lock = Lock()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a plain attribute in TextIOBase
        return self._target.encoding

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._target.fileno()

    def write(self, text: str) -> int:
        self._target.write(text)
        with self._lock:
            *lines, self._partial = (self._partial + text).split("\n")
        for line in lines:
            self._sink(self._name, line.rstrip("\r").rpartition("\r")[2])
        return len(text)

    def flush(self) -> None:
        self._target.flush()

    def finish_line(self) -> None:
        """Hands over what was printed without a line's end."""
        with self._lock:
            line, self._partial = self._partial, ""
        if line:
            self._sink(self._name, line)


@contextmanager
def teed(sink: Sink) -> Iterator[tuple[LineTee, LineTee]]:
    """Replaces sys.stdout and sys.stderr by tees for the length of a `with`."""
    before = sys.stdout, sys.stderr
    tees = LineTee(before[0], "stdout", sink), LineTee(before[1], "stderr", sink)
    sys.stdout, sys.stderr = tees
    try:
        yield tees
    finally:
        sys.stdout, sys.stderr = before
