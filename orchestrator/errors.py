"""How a job ends badly. A mistake of the user's own stays a ConfigError (exit code 2)."""

from __future__ import annotations

from typing import Any

from rayzero.engine.errors import ConfigError, RayzeroError


class JobFailedError(RayzeroError):
    """The job ended without success. `traceback` holds the user's frames, if it was user code."""

    def __init__(self, seen: str, allowed: str = "", fix: str = "", traceback: str = "") -> None:
        super().__init__(seen, allowed, fix)
        self.traceback = traceback

    def __str__(self) -> str:
        return _with_traceback(super().__str__(), self.traceback)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.seen, self.allowed, self.fix, self.traceback)


class JobConfigError(ConfigError):
    """A mistake in the job that only the workers could see, such as an entry point's."""

    def __init__(self, seen: str, allowed: str = "", fix: str = "", traceback: str = "") -> None:
        super().__init__(seen, allowed, fix)
        self.traceback = traceback

    def __str__(self) -> str:
        return _with_traceback(super().__str__(), self.traceback)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.seen, self.allowed, self.fix, self.traceback)


class JobStoppedError(RayzeroError):
    """The job was stopped before its end, because somebody asked for it."""


def _with_traceback(text: str, traceback: str) -> str:
    return f"{text}\n\n{traceback}" if traceback else text
