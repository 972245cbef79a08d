"""The messages of one worker on their way to the controller, in order."""

from __future__ import annotations

from collections import deque
from threading import Condition
from time import monotonic

from rayzero.workers.messages import LogLine, Message, Report


class Outbox:
    """A queue that any thread may fill and that a long poll empties.

    It is bounded in log lines only: when nobody polls, the oldest lines go and are counted.
    A poll waits a moment after an unhurried message, so that quick steps share a round trip.
    """

    def __init__(self, max_lines: int = 10_000, linger_s: float = 0.05) -> None:
        self._messages: deque[Message] = deque()
        self._ready = Condition()
        self._max_lines = max_lines
        self._linger_s = linger_s
        self._lines = 0
        self._dropped = 0
        self._urgent = False

    def post(self, message: Message) -> None:
        with self._ready:
            if isinstance(message, LogLine):
                if self._lines >= self._max_lines:
                    self._drop_a_line()
                self._lines += 1
            self._urgent = self._urgent or not isinstance(message, LogLine | Report)
            self._messages.append(message)
            self._ready.notify_all()

    def take(self, timeout_s: float) -> list[Message]:
        """Everything posted so far; waits up to `timeout_s` for the first message."""
        with self._ready:
            self._ready.wait_for(lambda: bool(self._messages), timeout_s)
            until = monotonic() + min(self._linger_s, timeout_s)
            while self._messages and not self._urgent:
                if not self._ready.wait(max(0.0, until - monotonic())):
                    break
            taken = list(self._messages)
            self._messages.clear()
            self._lines, self._urgent = 0, False
            dropped, self._dropped = self._dropped, 0
        if dropped:
            rank = next(m.rank for m in taken if isinstance(m, LogLine))
            taken.insert(0, LogLine(rank, "stderr", f"({dropped} earlier lines were dropped)"))
        return taken

    def _drop_a_line(self) -> None:
        place = next(i for i, m in enumerate(self._messages) if isinstance(m, LogLine))
        del self._messages[place]
        self._lines -= 1
        self._dropped += 1
