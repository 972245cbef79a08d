"""Errors that end a job, and losses that it may survive. A mistake of the user stays a ConfigError,
with exit code 2."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from rayzero.engine.errors import ConfigError, RayzeroError, render_short
from rayzero.workers.messages import WorkerInfo

P = ParamSpec("P")
T = TypeVar("T")


class _TracedError(RayzeroError):
    """An error with the traceback of user code, if it came from there."""

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


def internal_error(error: Exception) -> JobFailedError:
    """Returns the error of a job that fails because of a bug in rayzero."""
    return JobFailedError(
        f"rayzero itself failed: {type(error).__name__}: {error}", fix="please report this"
    )


class JobConfigError(_TracedError, ConfigError):
    """A configuration mistake that only the workers can detect, such as a missing entry point."""


class JobStoppedError(RayzeroError):
    """The job was stopped on request before its end."""


class JobInterrupted(KeyboardInterrupt):
    """Ctrl-C has stopped the job that this process waited for."""

    def _render_traceback_(self) -> list[str]:
        return render_short(self)


def short_traceback(method: Callable[P, T]) -> Callable[P, T]:
    """Wraps a public method so that the errors that it reports to a user have no frames of our
    code."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except (RayzeroError, JobInterrupted) as error:
            raise error.with_traceback(None)  # noqa: B904  # the same error

    return call


class WorkerLostError(Exception):
    """A worker's process is gone. The text says what the cluster knows about the cause."""


class WorkerStartError(WorkerLostError):
    """A worker's process did not start. `worker` has the worker's index and its node's id and name,
    but no process. `repeats` is whether another attempt would fail as well, because the cause is in
    the actor's constructor or environment."""

    def __init__(self, cause: str, worker: WorkerInfo, repeats: bool, retry_in_s: float) -> None:
        super().__init__(f"a worker did not start, trying again in {retry_in_s:g} s: {cause}")
        self.cause = cause
        self.worker = worker
        self.repeats = repeats


class VaultLostError(Exception):
    """A vault's process is gone, or its node."""
