"""How a host (a rayzero worker) lends its job to the engine, without the engine knowing the host.

A worker enters a session in its training thread before it calls the user's function; `initialize`
finds it there, takes the job's config and seed when the user gave none, and tells the session what
it built and every step that was finished. Under torchrun or alone there is no session.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rayzero.engine.layout.state_index import StateSource


@dataclass(frozen=True)
class StepRequests:
    """What ranks agree on in a step's vote, at no cost of its own.

    Attributes:
        drain: leave the training function at the end of this step. Agreed when any rank wishes it.
        pin: ready to keep a copy of this step until it is stored elsewhere. Agreed when all are.
        pace: steps between two mirrors that this rank's measurements ask for. Agreed is the mean.
    """

    drain: bool = False
    pin: bool = False
    mirror_interval: float = 1.0

    def to_scalars(self) -> list[float]:
        """As numbers that are summed over the ranks."""
        return [float(self.drain), float(self.pin), self.mirror_interval]

    @classmethod
    def from_sums(cls, sums: Sequence[float], ranks: int) -> StepRequests:
        """What the summed ballots of so many ranks say together."""
        drain, pin, pace = sums
        return cls(drain > 0, pin == ranks, pace / ranks)


NO_REQUESTS = StepRequests()


class HostSession(Protocol):
    """What a host offers the engine."""

    @property
    def engine_config(self) -> dict[str, Any] | None:
        """The job's engine config, already read from its file; None when the job has none."""

    @property
    def seed(self) -> int:
        """The job's seed: the data order follows from it."""

    @property
    def shares(self) -> Sequence[float]:
        """Each rank's share of a step's samples; empty for even shares."""

    def resume_from(self) -> AbstractContextManager[StateSource | None]:
        """The state that a new engine begins from; None for a fresh start."""

    def on_engine_ready(self, engine: Any) -> None:
        """Called once by `initialize` with the finished `Engine`, its state loaded.

        Not annotated as Engine: the engine imports this module, and imports run one way.
        """

    def on_phase(self, name: str) -> None:
        """The training thread entered a phase: data, forward, backward, reduce, update, gather."""

    def on_collective_wait(self, collective: int, entered: bool) -> None:
        """The training thread begins, or ends, to wait for other ranks in that collective."""

    def on_samples_consumed(self, samples: Sequence[int]) -> None:
        """The loader handed out samples with these numbers, as this rank's own."""

    def step_requests(self) -> StepRequests:
        """What this rank wants to agree on with the others in the vote of the step at hand."""

    def on_step_end(self, metrics: dict[str, float], agreed: StepRequests) -> None:
        """An optimizer step was finished on this rank, and its vote has been passed by all.

        `metrics` is `Engine.metrics` flattened to numbers. `agreed` is what the ranks wish
        together, the same on all of them.
        """


_current_session: ContextVar[HostSession | None] = ContextVar("rayzero_session", default=None)


def current_session() -> HostSession | None:
    """The session of the calling thread, or None outside a rayzero job."""
    return _current_session.get()


@contextmanager
def use_session(session: HostSession) -> Iterator[None]:
    """Makes `session` the calling thread's session for the length of a `with`."""
    token = _current_session.set(session)
    try:
        yield
    finally:
        _current_session.reset(token)
