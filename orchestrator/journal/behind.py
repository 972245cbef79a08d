"""A thread that writes lines behind whoever makes them, who never waits for a disk or a store."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition, Thread

from rayzero.engine.errors import first_line

KEPT = 10_000
"""Lines that wait to be written; beyond that the oldest are dropped, and it is told."""
RETRY_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""How long to wait after each failure; the last from then on."""


class Behind:
    """Owns a daemon thread, from the first line to `close`.

    Args:
        what: what is written, in the words of a warning.
        write: writes lines, or raises; then it is given them again.
        every_s: how long lines are gathered before they are written.
        tell: shows a warning; called in the thread.
    """

    def __init__(
        self,
        what: str,
        write: Callable[[Sequence[str]], None],
        every_s: float,
        tell: Callable[[str], None],
    ) -> None:
        self._what = what
        self._write = write
        self._every_s = every_s
        self._tell = tell
        self._lines: deque[str] = deque(maxlen=KEPT)
        self._dropped = 0
        self._failures = 0
        self._change = Condition()
        self._closing_until_s: float | None = None
        self._thread = Thread(target=self._run, name=f"rayzero-{what.split()[-1]}", daemon=True)

    def put(self, line: str) -> None:
        """Takes one line; returns at once."""
        with self._change:
            self._dropped += len(self._lines) == KEPT
            self._lines.append(line)
            if not self._thread.is_alive() and self._closing_until_s is None:
                self._thread.start()
            self._change.notify()

    def close(self, limit_s: float) -> bool:
        """Writes what is left; whether all of it was written in time."""
        with self._change:
            self._closing_until_s = time.monotonic() + limit_s
            self._change.notify()
        if self._thread.is_alive():
            self._thread.join(limit_s)
        return not self._lines

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: bool(self._lines) or self._is_closing)
                if not self._lines:
                    return
            self._pause(self._every_s)
            with self._change:
                lines, dropped = list(self._lines), self._dropped
            try:
                self._write(lines)
            except Exception as error:  # noqa: BLE001  # a thread that ended could not be told of it
                if not self._failed(error):
                    return
                continue
            self._failures = 0
            with self._change:
                # What was dropped meanwhile was at the front, and is among what was written.
                for _ in range(len(lines) - (self._dropped - dropped)):
                    self._lines.popleft()

    def _failed(self, error: Exception) -> bool:
        """Told once for each time that it begins to fail; whether to try again."""
        if self._failures == 0:
            what = first_line(error)
            self._tell(f"{self._what} cannot be written, and is tried again: {what}")
        until_s = self._closing_until_s
        if until_s is not None and time.monotonic() > until_s:
            return False
        self._pause(RETRY_S[min(self._failures, len(RETRY_S) - 1)], at_least_s=0.2)
        self._failures += 1
        return True

    def _pause(self, seconds: float, at_least_s: float = 0.0) -> None:
        """Shorter when it is being closed."""
        time.sleep(at_least_s)
        with self._change:
            self._change.wait_for(lambda: self._is_closing, max(0.0, seconds - at_least_s))

    @property
    def _is_closing(self) -> bool:
        return self._closing_until_s is not None
