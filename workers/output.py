"""A worker's outgoing messages, among them each line that the process prints."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from io import TextIOBase
from threading import Condition, Lock
from typing import TextIO

from rayzero.workers.messages import LogLine, StepReport, WorkerMessage


class Outbox:
    """A message queue filled by any thread and emptied by a long poll.

    Only log lines are bounded: without a poll, the oldest are dropped and counted. After a log line
    or a step report a poll lingers briefly, so that fast steps share a round trip.
    """

    def __init__(self, max_lines: int = 10_000, linger_s: float = 0.05) -> None:
        self._messages: deque[WorkerMessage] = deque()
        self._ready = Condition()
        self._max_lines = max_lines
        self._linger_s = linger_s
        self._line_count = 0
        self._dropped_lines = 0
        self._urgent = False

    def post(self, message: WorkerMessage) -> None:
        with self._ready:
            if isinstance(message, LogLine):
                if self._line_count >= self._max_lines:
                    self._drop_oldest_line()
                self._line_count += 1
            self._urgent = self._urgent or not isinstance(message, LogLine | StepReport)
            self._messages.append(message)
            self._ready.notify_all()

    def poll(self, timeout_s: float) -> list[WorkerMessage]:
        """All messages posted so far, in order; waits up to `timeout_s` for the first."""
        with self._ready:
            self._ready.wait_for(lambda: bool(self._messages), timeout_s)
            if self._messages:
                self._ready.wait_for(lambda: self._urgent, min(self._linger_s, timeout_s))
            messages = list(self._messages)
            self._messages.clear()
            self._line_count, self._urgent = 0, False
            dropped, self._dropped_lines = self._dropped_lines, 0
        if dropped:
            rank = next(m.rank for m in messages if isinstance(m, LogLine))
            messages.insert(0, LogLine(rank, "stderr", f"({dropped} earlier lines were dropped)"))
        return messages

    def _drop_oldest_line(self) -> None:
        oldest = next(i for i, m in enumerate(self._messages) if isinstance(m, LogLine))
        del self._messages[oldest]
        self._line_count -= 1
        self._dropped_lines += 1


LineSink = Callable[[str, str], None]
"""(stream name, line without its newline)"""


class LineTee(TextIOBase):
    """A text stream that writes through to `target` and passes each complete line to `sink`.

    Of a line redrawn with carriage returns, like a progress bar, only the last state is passed.
    """

    def __init__(self, target: TextIO, name: str, sink: LineSink) -> None:
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
        """Passes on a line that was printed without a newline."""
        with self._lock:
            line, self._partial = self._partial, ""
        if line:
            self._sink(self._name, line)


def tee_output(sink: LineSink) -> tuple[LineTee, LineTee]:
    """Replaces sys.stdout and sys.stderr by tees, for the rest of the process's life."""
    tees = LineTee(sys.stdout, "stdout", sink), LineTee(sys.stderr, "stderr", sink)
    sys.stdout, sys.stderr = tees
    return tees
