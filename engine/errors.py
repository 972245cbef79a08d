"""The errors of rayzero. They say what was seen, what is allowed, and which setting changes it.

All of them survive pickling, because they cross process boundaries.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from rayzero.engine.redact import redact_url


class RayzeroError(Exception):
    """The base of every error that rayzero raises on purpose.

    Credentials in URLs are taken out, whatever the text comes from: errors are printed, logged and
    sent to whoever asks.

    Args:
        seen: what went wrong, with the value that was seen.
        allowed: what would have been right, when that can be said.
        fix: what to change: a setting's name, a command, a file.
    """

    def __init__(self, seen: str, allowed: str = "", fix: str = "") -> None:
        self.seen, self.allowed, self.fix = redact_url(seen), redact_url(allowed), redact_url(fix)
        super().__init__(self.seen, self.allowed, self.fix)

    def __str__(self) -> str:
        parts = [self.seen]
        if self.allowed:
            parts.append(f"allowed: {self.allowed}")
        if self.fix:
            parts.append(f"to change it: {self.fix}")
        return "\n  ".join(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.seen, self.allowed, self.fix)


class ConfigError(RayzeroError):
    """A mistake in something the user wrote: a config file, a job file, an argument."""


class EngineError(RayzeroError):
    """The engine was used in a way that cannot work, at run time."""


class DataError(RayzeroError):
    """Training data that is missing, empty, or not what it says it is."""


class CollectiveError(RayzeroError):
    """A collective failed: a peer died, or the process group was aborted."""


def did_you_mean(word: str, allowed: list[str]) -> str:
    """` (did you mean 'x'?)`, or nothing when no allowed word is near."""
    close = get_close_matches(word, allowed, n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its type where it says nothing."""
    text = error.seen if isinstance(error, RayzeroError) else str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0]
