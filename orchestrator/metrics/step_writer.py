"""Files written behind the controller: one thread, a bounded queue, and nobody waits."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Protocol

from rayzero.engine.errors import first_line
from rayzero.orchestrator.progress import StepRecord

_WAITING = 4096
_CLOSE_S = 10.0


class Sink(Protocol):
    """A file of steps. Used by the writer's thread only; may raise what it likes."""

    def write(self, record: StepRecord) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class StepWriter:
    """Owns the thread and the sinks, from its making to `close`.

    What was put is in the files as soon as nothing else is waiting, so that a process that is
    killed loses no step that a checkpoint has. A sink that fails is told once, and left out; steps
    that come faster than they can be written are dropped, and counted.

    Args:
        tell: shows a warning; called in the writer's thread, or in that of `close`.
    """

    def __init__(self, sinks: Sequence[Sink], tell: Callable[[str], None]) -> None:
        self._sinks = list(sinks)
        self._tell = tell
        self._queue: queue.Queue[StepRecord | None] = queue.Queue(_WAITING)
        self._dropped = 0
        self._thread = Thread(target=self._run, name="rayzero-steps", daemon=True)
        self._thread.start()

    def put(self, record: StepRecord) -> None:
        """Never waits."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Writes what is waiting, for a while at most, and closes the files."""
        try:
            self._queue.put(None, timeout=_CLOSE_S)
        except queue.Full:
            self._tell("metrics: the last steps were not written, because the disk is too slow")
            return
        self._thread.join(_CLOSE_S)
        if self._dropped:
            self._tell(f"metrics: {self._dropped} steps came too fast to be written")

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            self._each(lambda sink, record=record: sink.write(record))  # type: ignore[misc]
            if self._queue.empty():
                self._each(lambda sink: sink.flush())
        self._each(lambda sink: sink.close())

    def _each(self, act: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                act(sink)
            except Exception as error:  # noqa: BLE001  # whatever it is, the others go on
                self._sinks.remove(sink)
                self._tell(f"metrics: {type(sink).__name__} writes no more: {first_line(error)}")
