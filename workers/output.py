"""A worker's outgoing messages, among them each line that the process prints."""

from __future__ import annotations

import os
import sys
from codecs import getincrementaldecoder
from collections.abc import Callable
from dataclasses import replace
from io import BufferedIOBase, TextIOWrapper
from operator import itemgetter
from threading import Condition, Lock
from typing import TYPE_CHECKING, TextIO

from rayzero.workers.bounded_queue import MAX_ITEMS, BoundedQueue
from rayzero.workers.messages import Crashed, LogLine, StepReport, WorkerMessage

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MAX_LINES_BYTES = 4 * 2**20
"""Limit of log lines kept for one poll. The controller's process takes these from each worker."""
MAX_DETAILED = 256
"""Messages kept for one poll with all their gauges."""
MAX_LINE_CHARACTERS = 16 * 1024
"""A longer line is passed in parts."""
MAX_ERROR_CHARACTERS = 32 * 1024


class Outbox:
    """A message queue filled by any thread and emptied by a long poll.

    Log lines are bounded: without a poll, the oldest are dropped and counted. Step reports are
    never dropped: beyond `MAX_DETAILED` messages, the oldest lose their detailed gauges, whose
    names have a slash. After a log line or a step report a poll lingers briefly, so that fast steps
    share a round trip.
    """

    def __init__(self, linger_s: float = 0.05, max_lines: int = MAX_ITEMS) -> None:
        self._numbered: list[tuple[int, WorkerMessage]] = []
        self._lines: BoundedQueue[tuple[int, LogLine]] = BoundedQueue(MAX_LINES_BYTES, max_lines)
        self._ready = Condition()
        self._linger_s = linger_s
        self._count = 0
        self._looked_at = 0  # how many of `_numbered` were searched for old details
        self._urgent = False

    def post(self, message: WorkerMessage) -> None:
        if isinstance(message, Crashed):  # events, the journal and the summary copy its texts
            error, stack = _shorten(message.error), _shorten(message.traceback)
            message = replace(message, error=error, traceback=stack)
        with self._ready:
            self._count += 1
            if isinstance(message, LogLine):
                self._lines.append((self._count, message))
            else:
                self._numbered.append((self._count, message))
                self._drop_old_details()
                self._urgent = self._urgent or not isinstance(message, StepReport)
            self._ready.notify_all()

    def poll(self, timeout_s: float) -> list[WorkerMessage]:
        """Returns all messages posted so far, in order. Waits up to `timeout_s` for the first."""
        with self._ready:
            self._ready.wait_for(lambda: bool(self._numbered or self._lines), timeout_s)
            if self._numbered or self._lines:
                self._ready.wait_for(lambda: self._urgent, min(self._linger_s, timeout_s))
            numbered, lines = self._numbered, list(self._lines.since(0))
            dropped, nbytes = self._lines.take_dropped()
            self._lines.clear()
            self._numbered, self._looked_at, self._urgent = [], 0, False
        messages = [message for _, message in sorted([*numbered, *lines], key=itemgetter(0))]
        if dropped:
            text = dropped_lines_text(dropped, nbytes, f"pid {os.getpid()}")
            messages.insert(0, replace(lines[0][1], stream="stderr", text=text))
        return messages

    def _drop_old_details(self) -> None:
        while len(self._numbered) - self._looked_at > MAX_DETAILED:
            number, message = self._numbered[self._looked_at]
            if isinstance(message, StepReport):
                gauges = {name: gauge for name, gauge in message.gauges.items() if "/" not in name}
                self._numbered[self._looked_at] = number, replace(message, gauges=gauges)
            self._looked_at += 1


def _shorten(text: str) -> str:
    """Leaves out the middle of a long text."""
    left_out, half = len(text) - MAX_ERROR_CHARACTERS, MAX_ERROR_CHARACTERS // 2
    if left_out <= 0:
        return text
    return f"{text[:half]}\n... ({left_out} characters left out) ...\n{text[-half:]}"


def dropped_lines_text(lines: int, nbytes: int, process: str) -> str:
    """Returns the line that replaces lines printed too fast in a job's log."""
    return (
        f"({lines} lines, {nbytes / 2**20:.1f} MiB, are not in this log: they were printed faster"
        f" than they could be collected; Ray's log of this worker's process, {process}, has them)"
    )


_RAY_PROGRESS = "__ray_tqdm_magic_token__"
"""Marks the lines in which Ray's progress bars (ray.experimental.tqdm_ray, Ray Data's) print their
states as JSON, for Ray's driver to draw. Such lines are not passed on."""

LineSink = Callable[[str, str], None]
"""Called with the stream's name, and a line without its newline."""


class LineTee(BufferedIOBase):
    """The `buffer` of sys.stdout or sys.stderr: writes bytes through to that of `target`, and
    passes each complete line to `sink`.

    Of a line redrawn with carriage returns, like a progress bar, only the last state is kept and
    passed. A tee lives as long as the process: `close` only flushes, because a script's own
    TextIOWrapper over the tee calls it when the wrapper is collected.
    """

    def __init__(self, target: TextIO, name: str, sink: LineSink) -> None:
        super().__init__()
        self.name = f"<{name}>"
        self._target = target
        self._stream = name
        self._sink = sink
        # What the script writes in another encoding is shown as escaped bytes.
        self._decoder = getincrementaldecoder(target.encoding)("backslashreplace")
        self._partial = ""
        self._lock = Lock()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._target.fileno()

    def isatty(self) -> bool:
        return self._target.isatty()

    def close(self) -> None:
        self.flush()

    def write(self, data: ReadableBuffer) -> int:
        self._target.buffer.write(data)
        self._target.flush()  # as Ray's streams do: a killed process's last words are in its log
        with self._lock:
            text = self._partial + self._decoder.decode(bytes(data))
            *lines, partial = text.split("\n")
            lines = [_last_state(line) for line in lines]
            if "\r" in partial:  # a final one is no redraw if a newline follows
                partial = _last_state(partial) + "\r" * partial.endswith("\r")
            if len(partial) > MAX_LINE_CHARACTERS:
                lines.append(partial)
                partial = ""
            self._partial = partial
        for line in lines:
            self._pass_on(line)
        return memoryview(data).nbytes

    def flush(self) -> None:
        self._target.flush()

    def finish_line(self) -> None:
        """Passes on a line that was printed without a newline."""
        with self._lock:
            line = self._partial + self._decoder.decode(b"", final=True)
            self._partial = ""
        if line:
            self._pass_on(_last_state(line))

    def _pass_on(self, line: str) -> None:
        if _RAY_PROGRESS in line:
            return
        for start in range(0, max(1, len(line)), MAX_LINE_CHARACTERS):
            self._sink(self._stream, line[start : start + MAX_LINE_CHARACTERS])


def _last_state(line: str) -> str:
    """Returns what a terminal would show of a line with carriage returns."""
    return line.rstrip("\r").rpartition("\r")[2]


def tee_output(sink: LineSink) -> tuple[LineTee, LineTee]:
    """Replaces sys.stdout and sys.stderr by text streams over tees, for the rest of the process's
    life."""
    tees = LineTee(sys.stdout, "stdout", sink), LineTee(sys.stderr, "stderr", sink)
    sys.stdout, sys.stderr = _text_over(tees[0], sys.stdout), _text_over(tees[1], sys.stderr)
    return tees


def _text_over(tee: LineTee, target: TextIO) -> TextIOWrapper:
    """Returns a text stream over `tee` with the settings of `target`. It holds no text back: a line
    is passed on when it is printed, before bytes that are written to `buffer` later."""
    target.flush()
    return TextIOWrapper(
        tee,
        encoding=target.encoding,
        errors=target.errors,
        newline="\n",
        line_buffering=bool(target.line_buffering),
        write_through=True,
    )
