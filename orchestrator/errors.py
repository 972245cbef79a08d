"""How a job ends badly. A mistake of the user's own stays a ConfigError (exit code 2)."""

from __future__ import annotations

from typing import Any

from rayzero.engine.errors import ConfigError, RayzeroError


class _TracedError(RayzeroError):
    """`traceback` holds the user's frames, if it was user code."""

    def __init__(self, seen: str, allowed: str = "", fix: str = "", traceback: str = "") -> None:
        super().__init__(seen, allowed, fix)
        self.traceback = traceback

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\n\n{self.traceback}" if self.traceback else text

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.seen, self.allowed, self.fix, self.traceback)


class JobFailedError(_TracedError):
    """The job ended without success."""


class JobConfigError(_TracedError, ConfigError):
    """A mistake in the job that only the workers could see, such as an entry point's."""


class JobStoppedError(RayzeroError):
    """The job was stopped before its end, because somebody asked for it."""
