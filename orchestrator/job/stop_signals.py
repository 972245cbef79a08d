"""Ctrl-C and SIGTERM while a process waits for a job, for the command line and `Job.run`.

The first signal requests the job's stop, the second one ends the wait. This module does not import
Ray, whose import takes a second.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any

from rayzero.orchestrator.errors import JobInterrupted
from rayzero.orchestrator.job_events import JobObserver, JobWarning

if TYPE_CHECKING:
    from rayzero.orchestrator.job.handle import JobHandle

_SIGNAL_POLL_S = 0.1


class StopSignals:
    """Handles signals inside a `with`, in the main thread.

    Before `graceful` is called, the first signal raises JobInterrupted. Afterwards it is only
    recorded, and the main thread's loop acts on it. The second signal calls `on_second`.

    The exception is not a plain KeyboardInterrupt: one that is raised inside `exec` of a string,
    for example while a module with dataclasses is imported, makes Python end the process by SIGINT
    although it was caught (CPython's `unhandled_keyboard_interrupt`). The exit code would be lost.

    Args:
        numbers: numbers of the signals.
        ends_process: whether the second signal ends this process. A local Ray cluster then ends
            with it; on any other cluster the job's process completes the stop by itself. If False,
            the second signal raises JobInterrupted.
    """

    def __init__(
        self,
        numbers: Iterable[int] = (signal.SIGINT, signal.SIGTERM),
        *,
        ends_process: bool = True,
    ) -> None:
        self.on_second: Callable[[], object] = lambda: None
        self.first: signal.Signals | None = None
        self._numbers = tuple(numbers)
        self._ends_process = ends_process
        self._is_graceful = False
        self._previous_handlers: dict[int, Any] = {}

    @classmethod
    def of_caller(cls) -> StopSignals:
        """Returns a handler of Ctrl-C for a process that belongs to the caller, such as a notebook.
        Handles no signal outside the main thread, or if the caller has a handler of its own."""
        is_main = threading.current_thread() is threading.main_thread()
        is_free = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return cls([signal.SIGINT] if is_free else (), ends_process=False)

    @property
    def exit_code(self) -> int:
        """128 + the number of the first signal; 0 without one."""
        return 0 if self.first is None else 128 + self.first

    def __enter__(self) -> StopSignals:
        self._previous_handlers = {
            number: signal.signal(number, self._on_signal) for number in self._numbers
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def graceful(self) -> None:
        """Makes the first signal only be recorded. Replaces handlers that were set meanwhile."""
        self._is_graceful = True
        for number in self._numbers:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.first is not None:
            self.on_second()
            if self._ends_process:
                os._exit(128 + number)
            raise JobInterrupted("interrupted twice")
        self.first = signal.Signals(number)
        if not self._is_graceful:
            raise JobInterrupted(f"interrupted by {self.first.name}")


def wait_stoppable(handle: JobHandle, signals: StopSignals, observer: JobObserver) -> None:
    """Waits for the job's end. At the first signal, requests the end and emits a warning."""
    stopping = False
    while not handle.wait(_SIGNAL_POLL_S):
        if signals.first is not None and not stopping:
            handle.stop()
            text = f"{signals.first.name}: stopping the job; once more {handle.on_hard_exit}"
            observer.on_event(JobWarning(text))
            stopping = True
