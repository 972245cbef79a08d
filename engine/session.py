"""The interface between the engine and its host, a rayzero worker.

A worker enters a session in its training thread before it calls the user's function. `Engine.build`
uses it for the job's config, seed and saved state, and reports phases and finished steps to it.
Under torchrun or alone there is no session, and `NO_HOST` takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rayzero.engine.errors import CollectiveError, EngineError

if TYPE_CHECKING:
    from torch import nn

    from rayzero.engine.comm.collectives import Collectives
    from rayzero.engine.config.parse import ConfigSource
    from rayzero.engine.layout.state_index import StateSource


T = TypeVar("T")


@dataclass(frozen=True)
class StepRequests:
    """The requests that ranks agree on in a step's vote, without a further collective."""

    # Leave the training function between this step and the next. Agreed if any rank requests it.
    drain: bool = False
    # Ready to keep a copy of this step until it is stored. Agreed if all ranks are.
    pin: bool = False
    # Ready for another division of the samples of later steps. Agreed if all ranks are.
    divide: bool = False
    # Steps between two mirrors, by this rank's measurements. Agreed is the mean.
    mirror_interval: float = 1.0
    # The number, from 1, of the engine that steps, if the function has several engines; else 0.
    engine: int = 0
    # Samples of the step that were left out. Agreed is the sum.
    bad_samples: int = 0
    # Other nodes have the newest step that this rank keeps for them. Agreed if so on all ranks.
    copied: bool = False
    # The bytes copied for that. Agreed is the sum.
    copied_bytes: int = 0

    def to_scalars(self) -> list[float]:
        """Returns the numbers that the vote sums over the ranks."""
        number = float(self.engine)
        numbers = [number, number**2] if self.engine else []
        flags = map(float, (self.drain, self.pin, self.divide, self.copied))
        amounts = self.mirror_interval, float(self.bad_samples), float(self.copied_bytes)
        return [*flags, *amounts, *numbers]

    @classmethod
    def from_sums(cls, sums: Sequence[float], ranks: int) -> StepRequests:
        """Returns the agreement of `ranks` ranks from their summed requests. Raises EngineError if
        the ranks step different engines: only equal numbers have a variance of zero."""
        drain, pin, divide, copied, interval, bad, copied_bytes, *numbers = sums
        if numbers and numbers[1] * ranks != numbers[0] ** 2:
            raise EngineError(
                "the ranks called step() of different engines at once: nothing was changed",
                allowed="the same calls in the same order on every rank, also on one that has "
                "just been started and continues at the job's step",
                fix="decide which engine steps by engine.global_steps, not by a count of the loop",
            )
        number = int(numbers[0] / ranks) if numbers else 0
        return cls(
            drain > 0,
            pin == ranks,
            divide == ranks,
            interval / ranks,
            number,
            round(bad),
            copied == ranks,
            round(copied_bytes),
        )


NO_REQUESTS = StepRequests()


OTHER_LOADER = object()
"""Stands for a loader that is not the engine's: the host yields its batches."""


class ScriptEpochs:
    """A host's services to the loaders of a script. Where a script is run again, it begins with the
    first epoch."""

    @property
    def peers_are_ahead(self) -> bool:
        """Whether other ranks are in the script's loop, where this one will come."""
        return False

    def begin_epoch(self) -> None:
        """Called where an iteration begins over a loader that the script trains on."""

    def end_epoch(self) -> None:
        """Called where that iteration ends."""

    def notes(self) -> bytes:
        """Returns what new members need to know of the newest epoch, beyond the training state."""
        return b""


class HostSession:
    """A host's services to the engine. The methods of this class do what is right without a host.
    All methods are called by the training thread.

    Attributes:
        engine_config: the job's engine config as a dict; None if the job has none.
        seed: the job's seed, which determines the data order.
        shares: each rank's share of a step's samples; empty for even shares.
        epochs: None unless the function is a script, which begins each of its loops again.
        builds_alone: the other ranks already have the engine that is about to be built, and do not
            take part.
        in_job: whether there is a host.
    """

    in_job: bool = True
    engine_config: dict[str, Any] | None = None
    seed: int = 0
    shares: Sequence[float] = ()
    epochs: ScriptEpochs | None = None
    builds_alone: bool = False

    def adapt_config(self, config: ConfigSource | None) -> ConfigSource | None:
        """Returns the config for an engine that is about to be built; `config` is the one given."""
        return config

    def on_model(self, model: nn.Module) -> None:
        """Called when an engine is about to be built of this model."""

    def session_for(self, name: str | None, *, trains: bool) -> HostSession:
        """Returns the session for an engine that is about to be built, with the name that the
        script gave it, if any. An engine that only evaluates (not `trains`) has no state to
        restore. Raises ConfigError if the name cannot be used."""
        return self

    def resume_from(self) -> AbstractContextManager[StateSource | None]:
        """Returns a context with the state to restore into a new engine; None for a fresh start. If
        the engine is built before its ranks form their group, entering it waits for them."""
        return nullcontext()

    def admits_load(self, step: int, engine_step: int, client_keys: Sequence[str]) -> bool:
        """Returns whether a checkpoint of `step`, with a client state of these keys, replaces the
        engine's state. If not, the engine keeps its state, which was restored and is newer. Raises
        ConfigError if neither is right."""
        return True

    def on_state_loaded(self, step: int) -> None:
        """Called on all ranks when the training function has loaded a checkpoint of `step`."""

    def on_engine_ready(self, engine: Any) -> None:
        """Called once with the finished `Engine`, its state loaded. (`Engine` imports this module,
        so its type cannot be named here.)"""

    def reform(self) -> None:
        """Called when the process group of an engine that outlives it (`GroupSurvival.enable`) is
        broken. Returns when there is another group, and the engine was re-cut for its ranks. Raises
        CollectiveError if the other group is broken, too."""

    def begins_step(self, loader: object | None, *, within: bool) -> bool:
        """Returns whether all ranks can begin a step at this call.

        Args:
            loader: the loader that is about to be read (`OTHER_LOADER` if it is not the engine's);
                None if a forward is called.
            within: the engine has gradients of the current step.
        """
        return not within

    @property
    def undoes_step(self) -> bool:
        """Whether the engine's last step is to be undone: other engines of the function have not
        made that step, and cannot make it any more in a broken process group."""
        return False

    def on_step_lost(self) -> None:
        """Called at the end of a `step()` that changed nothing because the group is broken."""

    def on_engine_closed(self) -> None:
        """Called when the engine cannot be used any more."""

    def on_phase(self, name: str) -> None:
        """Called when the training thread enters a phase: data, forward, backward, reduce, update,
        gather, publish. It may raise, to end the step, except in `OUTSIDE_PHASE`, between two
        phases. Called again and again with `SAMPLES_PHASE` while the thread waits for samples that
        other processes make."""

    def on_collective_wait(self, collective: int, entered: bool, engine: object = None) -> None:
        """Called when the training thread starts (`entered`), or has ended, waiting for other ranks
        in a collective. `engine` is one object for each engine that numbers its collectives."""

    def on_samples_consumed(self, samples: Sequence[int]) -> None:
        """Called with the samples of the loader that this rank has trained on, before the vote of
        their step."""

    def on_samples_skipped(self, samples: Sequence[int]) -> None:
        """Called with those samples of `on_samples_consumed` that were left out of training."""

    def step_requests(self) -> StepRequests:
        """Returns this rank's requests for the vote of the current step."""
        return NO_REQUESTS

    def on_step_end(self, metrics: dict[str, float], agreed: StepRequests) -> None:
        """Called when an optimizer step has finished on this rank. `metrics` is `Engine.metrics`
        flattened to numbers, `agreed` the ranks' common decision. After a drain, the host ends the
        function in the `on_phase` with which the next step begins."""


class _NoHost(HostSession):
    in_job = False


NO_HOST = _NoHost()


class BesideSession(HostSession):
    """The session of an engine that only evaluates: a reference or a reward model. The host gets
    the engine's phases and waits, as signs of life. The engine has no state to preserve."""

    def __init__(
        self,
        host: HostSession,
        on_ready: Callable[[Any], None] = lambda _: None,
        *,
        alone: bool = False,
    ) -> None:
        self.builds_alone = alone
        self._on_ready = on_ready
        self.engine_config = host.engine_config
        self.seed = host.seed
        self.shares = host.shares
        self._host = host

    def on_engine_ready(self, engine: Any) -> None:
        self._on_ready(engine)

    def on_phase(self, name: str) -> None:
        self._host.on_phase(name)

    def on_collective_wait(self, collective: int, entered: bool, engine: object = None) -> None:
        self._host.on_collective_wait(collective, entered, self)


class Reforming:
    """Asks the host for another process group in place of an engine's broken group.

    Within a training step a broken group is a state, not an exception (`Collectives.broken`): the
    script's forward and backward run on, and `step()` commits nothing. The engine waits for another
    group where the next step begins, because new ranks begin there. A collective that the script
    starts between two steps raises: new ranks would not take part. Used by the training thread.
    """

    def __init__(self, collectives: Collectives, session: HostSession) -> None:
        self.gathered_between_steps = False
        """Whether a call between two steps has needed all ranks."""
        self.by_host = False
        """Whether the host yields the batches of the script's own loader: it asks for another group
        before each batch, and yields the batches of a lost step again."""
        self._collectives = collectives
        self._session = session

    def is_due(self) -> bool:
        """Returns whether the process group is broken."""
        return bool(self._collectives.broken)

    def lose_step(self) -> bool:
        """Called at the end of a `step()` that changes nothing. Returns whether the process group
        is broken, and if so tells the host of the lost step."""
        is_due = self.is_due()
        if is_due:
            self._session.on_step_lost()
        return is_due

    @property
    def undoes_step(self) -> bool:
        """See `HostSession.undoes_step`."""
        return self.is_due() and self._session.undoes_step

    def before_read(self, loader: object, *, within: bool = False) -> None:
        """Called before the training thread reads a micro-batch of `loader`; see
        `HostSession.begins_step`."""
        if self._session.begins_step(loader, within=within):
            self.reform_if_broken()

    def reform_if_broken(self) -> None:
        """If the process group is broken, waits until the engine was re-cut for the ranks of
        another group. The work of the current step is lost, and its samples are read again. Raises
        CollectiveError if the engine does not outlive its group."""
        while reason := self._collectives.broken:
            if self._collectives.on_broken is None:
                raise CollectiveError(reason)
            with suppress(
                CollectiveError
            ):  # the other group is broken, too: asks for a further one
                self._session.reform()

    def with_peers(self, call: Callable[[], T], *, by_new_ranks: bool = True) -> T:
        """Returns the result of a call that may need all ranks outside of a step's own passes.
        Raises CollectiveError if the group is broken, since the result would be undefined.

        `by_new_ranks` is False if the script makes the call after each epoch, and a new rank does
        not repeat the calls of epochs that had ended before it joined.
        """
        called = self._collectives.counters.sequence
        result = call()
        if by_new_ranks and self._collectives.counters.sequence != called:
            self.gathered_between_steps = True
        if reason := self._collectives.broken:
            raise CollectiveError(reason)
        return result


_current_session: ContextVar[HostSession | None] = ContextVar("rayzero_session", default=None)


def current_session() -> HostSession | None:
    """Returns the session of the calling thread, or None outside a rayzero job."""
    return _current_session.get()


@contextmanager
def use_session(session: HostSession) -> Iterator[None]:
    """Makes `session` the calling thread's session in this context."""
    token = _current_session.set(session)
    try:
        yield
    finally:
        _current_session.reset(token)
