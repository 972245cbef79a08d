"""A script's loop over a loader of Accelerate's, from where the job stands and through its faults.

A script that is entered begins its loops again: a finished epoch yields nothing, the current one
the batches that are left. In a loop that continues after a fault or a resize, the batches of the
step that was lost are read again, cut for the present ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from typing import Any

from rayzero.engine.engine import Engine
from rayzero.engine.errors import CollectiveError
from rayzero.engine.session import current_session
from rayzero.engine.state.metadata import capture_rng, restore_rng
from rayzero.workers.launch.kept_schedules import KeptSchedules
from rayzero.workers.session import JobSession


@dataclass
class Place:
    """The position of a script's loop over a loader.

    Attributes:
        loader: as Accelerate has prepared it.
        missed_steps: finished ones that the loop has not come to.
        step_batches: of this rank, of a step.
        recut: called when the ranks may have changed; returns the batches of a step.
        loaded_step: of the checkpoint that a script has loaded when it was run again.
        check_stepped: called before each batch but the first.
        schedules: torch's, which the engine does not have.
    """

    loader: Any
    missed_steps: int
    step_batches: int
    recut: Callable[[], int]
    loaded_step: int | None = None
    check_stepped: Callable[[], None] = lambda: None
    schedules: KeptSchedules = field(default_factory=KeptSchedules)

    def skipped_by_script(self, batches: int) -> int:
        """The batches to skip of an epoch, where the script asks for `batches`. It may have counted
        them on another number of ranks: the step of its checkpoint counts, if it has loaded one."""
        if self.loaded_step is None or not batches:
            return batches
        return self.loaded_step % self._steps(len(self.loader)) * self.step_batches

    def begin_epoch(self, skipped: int) -> int | None:
        """The steps to leave out, in addition to what the script itself skips; None: all."""
        steps = self._steps(len(self.loader) - skipped)
        done = min(self.missed_steps, steps)
        self.missed_steps -= done
        is_finished = done == steps
        if (engine := getattr(current_session(), "engine", None)) is not None:
            engine.progress.script_lag = self.missed_steps if is_finished else None
        return None if is_finished else done

    def _steps(self, batches: int) -> int:
        return math.ceil(batches / self.step_batches)


_patched = set[type]()


def set_place(loader: Any, place: Place, skipped: int = 0) -> None:
    """Makes the loader's iterations begin at the place, behind the batches that the script skips.
    A drain ends them where the script asks for the batch after a step."""
    if type(loader) not in _patched:
        _patched.add(type(loader))
        type(loader).__iter__ = _continuing_iter(type(loader).__iter__)
    loader.rayzero_place = place, skipped


def place_of(loader: Any) -> Place | None:
    place, _ = getattr(loader, "rayzero_place", (None, 0))
    return place


def skipping_from_place(skip: Callable[..., Any]) -> Callable[..., Any]:
    """`skip_first_batches`, which makes another loader."""

    @wraps(skip)
    def skipping(dataloader: Any, num_batches: int = 0) -> Any:
        place = place_of(dataloader)
        if place is None:
            return skip(dataloader, num_batches)
        skipped = place.skipped_by_script(num_batches)
        rest = skip(dataloader, skipped)
        set_place(rest, place, skipped)
        return rest

    return skipping


def _continuing_iter(iterate: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def continuing(self: Any) -> Iterator[Any]:
        place, skipped = getattr(self, "rayzero_place", (None, 0))
        session = current_session()
        if place is None or not isinstance(session, JobSession) or session.engine is None:
            return iterate(self)
        return _Epoch(self, iterate, place, skipped).batches(session, session.engine)

    return continuing


class _Epoch:
    """One iteration of a loader.

    Args:
        loader: what the script iterates: the place's, or the rest of an epoch of it.
        skipped: batches that the script leaves out of the epoch.
    """

    def __init__(
        self, loader: Any, iterate: Callable[..., Iterator[Any]], place: Place, skipped: int
    ) -> None:
        self._loader = loader
        self._iterate = iterate
        self._place = place
        self._skipped_steps = skipped // place.step_batches
        self._done_steps = place.begin_epoch(skipped)
        self._skipped = skipped

    def batches(self, session: JobSession, engine: Engine) -> Iterator[Any]:
        loader = self._loader
        place = self._place
        done = self._done_steps
        if done is None:  # a sampler's generator advances from epoch to epoch
            for _ in loader.batch_sampler:
                pass
            loader.iteration += 1
            return
        order = agree_on_order(loader) if session.loop.yields_again else None
        first_step = engine.progress.step - done
        batches = self._rest(done) if done else self._iterate(loader)
        while True:
            seen = engine.progress.lost_steps, session.assignment.generation
            place.schedules.keep(engine.progress.step)
            is_complete = True
            for batch in batches:
                yield batch
                place.check_stepped()
                session.on_phase("data")
                if session.loop.yields_again:
                    engine.survival.await_group()
                if (engine.progress.lost_steps, session.assignment.generation) != seen:
                    is_complete = False
                    break
                place.schedules.keep(engine.progress.step)
            if is_complete:
                return
            batches = self._read_again(batches, engine, engine.progress.step - first_step, order)

    def _read_again(
        self, batches: Iterator[Any], engine: Engine, done: int, order: Any
    ) -> Iterator[Any]:
        """Iterates over the batches behind `done` steps, cut for the present ranks, in the same
        order. Raises CollectiveError if the job has gone back to an earlier epoch."""
        if done < 0:
            raise CollectiveError(f"the job went back by {-done} steps, before this epoch")
        self._place.schedules.restore(engine.progress.step)
        with closing(batches):  # type: ignore[type-var]
            self._place.step_batches = self._place.recut()
        self._loader.end()
        if order is not None:
            self._loader.synchronized_generator.set_state(order)
        if not done:
            return self._rest(done, alone=True)
        # A new iteration draws a seed for its workers, which the epoch has drawn before.
        rng = capture_rng(engine.device)
        rest = self._rest(done, alone=True)
        first = next(rest, None)
        restore_rng(rng, engine.device)
        return iter(()) if first is None else _put_before(first, rest)

    def _rest(self, done: int, *, alone: bool = False) -> Iterator[Any]:
        """Iterates over the batches behind `done` steps, and behind what the script skips.

        `alone`: the ranks have agreed on the sampler's generator before.
        """
        place = self._place
        skipped = self._skipped_steps * place.step_batches if alone else self._skipped
        behind = skipped + done * place.step_batches
        yield from read_behind(place.loader, behind, self._loader.iteration, agreed=alone)
        self._loader.iteration += 1


def can_read_again(loader: Any, *, by_epoch: bool = False) -> bool:
    """Whether the batches of an epoch can be read again, cut for other ranks: a sampler can cut
    them, and gives the same order again. `by_epoch`: from the epoch's number alone."""
    cut: Any = getattr(loader, "batch_sampler", None)
    if type(cut).__name__ != "BatchSamplerShard" or cut.split_batches:
        return False
    sampler: Any = getattr(cut.batch_sampler, "sampler", None)
    if type(sampler).__name__ in ("SeedableRandomSampler", "SequentialSampler"):
        return True
    generator = getattr(sampler, "generator", None)
    return not by_epoch and generator is not None and generator is loader.synchronized_generator


def agree_on_order(loader: Any) -> Any:
    """Returns the state in which the generator of the loader's sampler begins an epoch; None if it
    has no generator. Collective, as the loader's own iteration."""
    if (generator := loader.synchronized_generator) is None:
        return None
    import_module("accelerate.utils").synchronize_rng_states(loader.rng_types, generator)
    return generator.get_state()


def read_behind(loader: Any, batches: int, epoch: int, *, agreed: bool) -> Iterator[Any]:
    """Iterates over an epoch's batches, but for the first `batches`.

    `agreed`: the ranks have agreed on the sampler's generator before.
    """
    rest = import_module("accelerate").skip_first_batches.__wrapped__(loader, batches)
    rest.iteration = epoch
    if agreed:
        rest.rng_types = None
    try:
        yield from rest
    finally:
        rest.end()


def _put_before(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest
