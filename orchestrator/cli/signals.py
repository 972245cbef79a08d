"""Ctrl-C and SIGTERM: the first asks for a clean end, the second ends the process at once."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Handles the signals for the length of a `with`, in the main thread.

    Until `defer`, a signal raises KeyboardInterrupt. From then on the first one is only noted, and
    the main thread's loop acts on it. The second ends this process: a Ray cluster of our own dies
    with it, and on any other cluster the job's process finishes the stop by itself.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """128 + the signal's number once one came, 0 before."""
        return 0 if self._first is None else 128 + self._first

    @property
    def name(self) -> str:
        return "" if self._first is None else signal.Signals(self._first).name

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._interrupt) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def defer(self) -> None:
        """Only notes the first signal from now on, whoever took the handlers over meanwhile."""
        for number in _SIGNALS:
            signal.signal(number, self._note)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._first = self._first or number
        raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._first is not None:
            os._exit(128 + number)
        self._first = number
