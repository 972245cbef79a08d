"""rayzero's errors: what was seen, what is allowed, which setting changes it. All are picklable."""

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
"""Errors of libraries, and of code here, for unexpected keys, types, lengths and numbers in files;
RuntimeError is also torch's, and RecursionError is one."""

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
        """The lines that notebooks and IPython show instead of a traceback through our code."""
        return render_short(self)


def render_short(error: BaseException) -> list[str]:
    """The message of an error first, then the line of the user's code where it was raised, and its
    cause with the traceback."""
    lines = f"{type(error).__name__}: {error}".splitlines()
    frames = traceback.extract_tb(error.__traceback__)
    if users := [frame for frame in frames if not is_own_file(frame.filename)]:
        lines.append(f"  in line {users[-1].lineno} of {users[-1].name}: {users[-1].line}")
    if error.__cause__ is not None:
        lines += ["", *"".join(traceback.format_exception(error.__cause__)).splitlines()]
    return lines


def is_own_file(path: str) -> bool:
    """Whether a frame with this file is of rayzero's code."""
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
    """Raises a DataError for an error of the user's code or a library's: what failed, and why."""
    try:
        yield
    except RayzeroError:
        raise
    except Exception as error:
        raise DataError(f"{what()}: {type(error).__name__}: {error}", allowed, fix) from error


def is_number(value: Any, *, whole: bool = False) -> bool:
    """Whether this is a number, of Python or numpy; a whole one, if that is asked."""
    return isinstance(value, Integral if whole else Real)


def check_positive(call: str, *, whole: bool = True, **values: Any) -> None:
    """Raises ConfigError unless each argument of a call is a number above 0, and a whole one."""
    for name, value in values.items():
        if not (is_number(value, whole=whole) and value > 0):
            allowed = "a whole number, 1 or more" if whole else "a number above 0"
            raise ConfigError(f"{name} of {call} is {value!r}", allowed, f"set {name}")


_LEAST_BEGINNING = 4


def did_you_mean(word: str, allowed: list[str]) -> str:
    """` (did you mean 'x'?)`, or an empty string if no allowed word is similar: `every` begins
    every_steps, `lr` abbreviates learning_rate, or the other way round."""
    close = [it for it in allowed if len(word) >= _LEAST_BEGINNING and it.startswith(f"{word}_")]
    close += [it for it in allowed if word and (_initials(it) == word or it == _initials(word))]
    close += get_close_matches(word, allowed, n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _initials(name: str) -> str:
    """`lr` of learning_rate; nothing of a single word."""
    parts = [part for part in name.split("_") if part]
    return "".join(part[0] for part in parts) if len(parts) > 1 else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type if the message is empty."""
    text = error.seen if isinstance(error, RayzeroError) else str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0]
