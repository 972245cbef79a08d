"""How a host (a rayzero worker) lends its job to the engine, without the engine knowing the host.

A worker enters a session in its training thread before it calls the user's function; `initialize`
finds it there, takes the job's config and seed when the user gave none, and tells the session what
it built and every step that was finished. Under torchrun or alone there is no session.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rayzero.engine.engine import Engine


class Session(Protocol):
    """What a host offers the engine."""

    @property
    def engine_config(self) -> dict[str, Any] | None:
        """The job's engine config, already read from its file; None when the job has none."""

    @property
    def seed(self) -> int:
        """The job's seed: the data order follows from it."""

    def engine_ready(self, engine: Engine) -> None:
        """Called once by `initialize` with the finished engine."""

    def phase(self, name: str) -> None:
        """The training thread entered a phase: data, forward, backward, reduce, update, gather."""

    def step_done(self, metrics: dict[str, float]) -> None:
        """An optimizer step was finished; `metrics` is `Engine.metrics` flattened to numbers."""


_current: ContextVar[Session | None] = ContextVar("rayzero_session", default=None)


def current_session() -> Session | None:
    """The session of the calling thread, or None outside a rayzero job."""
    return _current.get()


@contextmanager
def entered(session: Session) -> Iterator[None]:
    """Makes `session` the calling thread's session for the length of a `with`."""
    token = _current.set(session)
    try:
        yield
    finally:
        _current.reset(token)
