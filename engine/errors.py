"""rayzero's errors: what was seen, what is allowed, how to fix it. All are picklable."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from rayzero.engine.redact import redact_url

CONTENT_ERRORS = (
    *(LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError),
    *(AssertionError, MemoryError),
)
"""Errors of libraries, and of code here, for unexpected keys, types, lengths and numbers in files.
torch raises RuntimeError, of which RecursionError is a subclass."""

_PACKAGE_FOLDER = f"{Path(__file__).parents[1]}{os.sep}"


class RayzeroError(Exception):
    """Base class of rayzero's errors.

    Credentials in URLs are removed from the text: errors are printed, logged and sent to clients.

    Args:
        seen: what went wrong, with the value that was seen.
        allowed: the valid values, if known.
        fix: what to do about it; begins with a verb, a setting or a command.
    """

    def __init__(self, seen: str, allowed: str = "", fix: str = "") -> None:
        self.seen = redact_url(seen)
        self.allowed = redact_url(allowed)
        self.fix = redact_url(fix)
        super().__init__(self.seen, self.allowed, self.fix)

    def __str__(self) -> str:
        parts = [self.seen]
        if self.allowed:
            parts.append(f"allowed: {self.allowed}")
        if self.fix:
            parts.append(f"fix: {self.fix}")
        return "\n  ".join(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.seen, self.allowed, self.fix)

    def _render_traceback_(self) -> list[str]:
        """Returns lines that notebooks and IPython show instead of a traceback through our code."""
        return render_short(self)


def render_short(error: BaseException) -> list[str]:
    """Returns lines that show an error: its message, the line of the user's code where it was
    raised, and its cause with the traceback."""
    lines = f"{type(error).__name__}: {error}".splitlines()
    frames = traceback.extract_tb(error.__traceback__)
    if users := [frame for frame in frames if not is_own_file(frame.filename)]:
        lines.append(f"  in line {users[-1].lineno} of {users[-1].name}: {users[-1].line}")
    if error.__cause__ is not None:
        lines += ["", *"".join(traceback.format_exception(error.__cause__)).splitlines()]
    return lines


def is_own_file(path: str) -> bool:
    """Returns whether a file is of rayzero's code."""
    return path.startswith(_PACKAGE_FOLDER)


class ConfigError(RayzeroError, ValueError):
    """A mistake in the user's input: a config file, a job file, an argument. A ValueError, because
    scripts written for DeepSpeed catch that."""


class EngineError(RayzeroError):
    """Invalid use of the engine at run time."""


class DataError(RayzeroError):
    """Training data is missing, empty or inconsistent."""


class CollectiveError(RayzeroError):
    """A collective failed: a peer died, or the process group was aborted."""


@contextmanager
def named_errors(what: Callable[[], str], allowed: str = "", fix: str = "") -> Iterator[None]:
    """Turns an error of the user's code or a library's in this context into a DataError, which says
    what failed, and why."""
    try:
        yield
    except RayzeroError:
        raise
    except Exception as error:
        raise DataError(f"{what()}: {type(error).__name__}: {error}", allowed, fix) from error


def is_number(value: Any, *, whole: bool = False) -> bool:
    """Returns whether a value is a number of Python or numpy; with `whole`, an integer."""
    return isinstance(value, Integral if whole else Real)


def check_positive(call: str, *, whole: bool = True, **values: Any) -> None:
    """Raises ConfigError unless each argument of a call is a number above 0; with `whole`, an
    integer."""
    for name, value in values.items():
        if not (is_number(value, whole=whole) and value > 0):
            allowed = "a whole number, 1 or more" if whole else "a number above 0"
            raise ConfigError(f"{name} of {call} is {value!r}", allowed, f"set {name}")


_MIN_PREFIX = 4


def did_you_mean(word: str, allowed: list[str]) -> str:
    """Returns ` (did you mean 'x'?)`, or an empty string if no allowed word is similar. Besides a
    word of similar spelling, this finds a word that begins with `word` (`every`, every_steps), its
    long form (`lr`, learning_rate) and its abbreviation."""
    close = []
    if len(word) >= _MIN_PREFIX:
        close += [name for name in allowed if name.startswith(f"{word}_")]
    if word:
        close += [name for name in allowed if _initials(name) == word or name == _initials(word)]
    close += get_close_matches(word, allowed, n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _initials(name: str) -> str:
    """Returns the initials of a name (`lr` of learning_rate), an empty string for one word."""
    parts = [part for part in name.split("_") if part]
    return "".join(part[0] for part in parts) if len(parts) > 1 else ""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message; its type if the message is empty."""
    text = error.seen if isinstance(error, RayzeroError) else str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0]
