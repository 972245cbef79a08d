"""The way out of the user's function when its generation is over."""

from __future__ import annotations

from threading import Event


class Interrupted(BaseException):
    """Unwinds the user's function. Not an Exception: `except Exception` must not swallow it."""


class Interrupt:
    """Set by the command thread, raised in the training thread at its next `check`."""

    def __init__(self) -> None:
        self._wanted = Event()

    def request(self) -> None:
        self._wanted.set()

    @property
    def requested(self) -> bool:
        return self._wanted.is_set()

    def check(self) -> None:
        """Raises Interrupted once an interrupt was requested."""
        if self._wanted.is_set():
            raise Interrupted
