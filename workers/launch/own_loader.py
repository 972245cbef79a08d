"""A script's loop over torch DataLoaders of its own, which continues through faults.

On a surviving rank the loop is a `FollowedLoop`. On a new rank the script begins again, and its
loop continues where the lost rank's was: a finished epoch yields nothing, and the current epoch
yields the batches that are left.

Both require a script that leaves its position to the loader, that is, one that reads neither
`engine.global_steps` nor a checkpoint before its first step; and that trains on each batch in the
step in which it reads the batch. If torch's DistributedSampler orders the samples, they are divided
among any number of ranks. Otherwise the loop continues only if the worker keeps its rank, and the
number of ranks stays the same.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from time import perf_counter
from typing import Any

import torch
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR
from torch.utils.data import DataLoader

from rayzero.engine.data.streams.positions import check_sampler
from rayzero.engine.engine import Engine
from rayzero.engine.errors import CollectiveError
from rayzero.engine.state.metadata import capture_rng, restore_rng
from rayzero.workers.launch.adapters import Original, wrap
from rayzero.workers.launch.followed_loop import FollowedLoop, present_ranks
from rayzero.workers.launch.kept_schedules import KeptSchedules, StepwiseSchedules
from rayzero.workers.launch.read_batches import (
    Batch,
    check_ranks,
    cut_for,
    has_constant_batches,
    is_cut_by_sampler,
    iterate_behind,
    keep_seed,
    leave_out_epoch,
    random_state_of,
)
from rayzero.workers.session import JobSession

log = logging.getLogger("rayzero.workers")

_ASKS = (
    "the script reads engine.global_steps, or a checkpoint, before its first step: after a fault it"
    " is run again, with its DataLoaders at their beginnings, and must find its place by these. If"
    " it does not, as where it prints the step only, read that after the first step: DataLoaders"
    " then continue by themselves"
)
_STATE = "rayzero.own_loader"
_END = object()


class OwnLoaders:
    """The DataLoaders that a script trains on. Used by the training thread.

    Attributes:
        schedules: the learning-rate schedules that the script has made.
        stepwise: follows them if the script trains on the loader of `training_data=` instead.
        loop: the loop that the script stays in through faults. None before the script has read a
            batch, and if it cannot stay.
        copies: whether the script changes its batches in place, so that copies must be kept.
    """

    def __init__(self, session: JobSession) -> None:
        self.schedules = KeptSchedules()
        self.stepwise = StepwiseSchedules(session, self.schedules)
        self.loop: FollowedLoop | None = None
        self.copies = False
        self._session = session
        self._readings: list[_Reading] = []
        self._found: dict[str, Any] = {}  # the position in the restored state
        self._is_cut = False  # a DistributedSampler divides the samples, for any number of ranks
        self._micro_steps = self._first_step = 0
        self._has_given_up = False
        session.registry.register(_STATE, self._place, self._find)

    def iterate(self, loader: Any, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Returns an iteration over a loader. `begin` is torch's own `__iter__`."""
        engine = self._session.engine
        if engine is None or not self._follows(engine):
            return begin()
        reading = next((known for known in self._readings if known.loader is loader), None)
        if reading is None:
            check_sampler(loader)
            reading = _Reading(loader, self, engine)
            self._readings.append(reading)
        self._session.loop.epochs.begin_epoch()
        reading.open(begin)
        if self._found:
            check_ranks(loader, self._found["ranks"])
        number = str(self._readings.index(reading))
        epoch, batches, rng = self._found.get("places", {}).get(number, (0, 0, None))
        if reading.epochs < epoch:
            leave_out_epoch(loader, reading.epochs)
            engine.progress.leave_epoch_out(epoch - reading.epochs, peers_are_ahead=False)
            self._session.loop.epochs.end_epoch()
            return iter(())
        engine.progress.script_lag = None
        if reading.epochs > epoch or not batches:
            reading.source = begin()
            return reading
        reading.rng, reading.batches = rng, self._own_batches(engine, batches)
        with random_state_of(rng):
            if epoch > 1 and loader.persistent_workers:
                keep_seed(loader)
            rest = iterate_behind(loader, reading.batches, begin)
        engine.progress.reach_place()
        first = next(rest, _END)
        if first is _END:  # what follows the epoch is due only if nobody has done it
            epochs = self._session.loop.epochs
            engine.progress.leave_epoch_out(0, peers_are_ahead=epochs.peers_are_ahead)
            epochs.end_epoch()
            return iter(())
        reading.source = chain([first], rest)
        return reading

    def _own_batches(self, engine: Engine, batches: int) -> int:
        """Returns how many batches this rank leaves out of an epoch of which each rank of the
        restored state had read `batches`."""
        ranks = present_ranks()[1]
        if has_constant_batches(engine) or ranks == self._found["ranks"]:
            return int(batches * self._found["ranks"] // ranks)
        return batches // int(self._found["micro_steps"]) * engine.settings.batches.micro_steps

    def await_change(self, engine: Engine) -> bool:
        """Waits at the end of an epoch until all ranks are present, if some are missing.

        Returns:
            Whether steps of the epoch were lost, or the ranks changed, so that the epoch may have
            more batches.
        """
        loop = self.loop
        is_same = loop is None or not (engine.survival.local_reason or loop.has_changed)
        if loop is None or is_same or not self._follows(engine):
            return False
        engine.survival.await_group()
        if engine.progress.step > loop.step:
            return False
        self._follow_step(loop, engine)
        return True

    def end_epoch(self) -> None:
        """Called where an iteration has yielded all its batches."""
        if not self._has_given_up:
            self._session.loop.epochs.end_epoch()

    def begin_batch(self, engine: Engine) -> None:
        """Waits before a batch until all ranks are present, and puts the batches of a lost step in
        front of it.

        Raises:
            CollectiveError: these batches cannot be yielded again. The script is run again.
        """
        if not self._follows(engine):
            return
        if self.loop is None:
            self._first_step = self._session.restored_step
        asked = engine.progress.place_asked_at
        if asked is not None and asked <= self._first_step and not self._found:
            self._give_up()
            if engine.rank == 0:
                log.warning(_ASKS)
            return
        loop = self.loop or self._begin_to_follow(engine)
        self._follow_step(loop, engine)
        self._meet(loop)

    def _begin_to_follow(self, engine: Engine) -> FollowedLoop:
        self._session.follow_loop(engine)
        self.schedules.begin(engine, self._found)
        self.loop = FollowedLoop(self._session, engine, self.schedules)
        batches = engine.settings.batches
        self._micro_steps = batches.micro_steps
        self._is_cut = has_constant_batches(engine) and all(
            is_cut_by_sampler(reading.loader, batches.micro_batch) for reading in self._readings
        )
        return self.loop

    def _follow_step(self, loop: FollowedLoop, engine: Engine) -> None:
        """Handles that since the previous batch a step has ended, or was lost, or neither."""
        began, read = loop.step, loop.kept.get(loop.step, [])
        has_changed = loop.follow()
        if loop.step > began:
            self._end_step(loop, began, read)
        elif has_changed:
            self._go_back(loop, began)
        if self.loop is not None and loop.ranks != present_ranks():
            self._recut(loop, engine)

    def _end_step(self, loop: FollowedLoop, began: int, read: list[tuple[_Reading, Batch]]) -> None:
        """Stops following a script that has read the step's batches before the step, or read
        another number of batches than a step has."""
        counts = Counter(id(reading) for reading, _ in read)
        in_step = loop.step == began + 1 and {*counts.values()} == {self._micro_steps}
        if read and not in_step:
            self._give_up()
        elif self._is_cut and not self._session.loop.divides_steps:
            self._session.divide_step(self._micro_steps * loop.ranks[1])
        self.copies = self.copies or any(batch.is_changed for _, batch in read)

    def _go_back(self, loop: FollowedLoop, began: int) -> None:
        """Puts the batches of the lost steps in front, to be yielded again."""
        lost_steps = sorted(step for step in loop.kept if step >= loop.step)
        lost = [read for step in lost_steps for read in loop.kept.pop(step)]
        is_left = any(batch.epoch != reading.epochs or batch.is_changed for reading, batch in lost)
        if is_left or (loop.step < began and not lost):
            raise CollectiveError(
                f"the batches after step {loop.step} cannot be read again: the script has changed "
                "them, or begun another epoch since, or they are of more steps than are kept"
            )
        for reading, batch in reversed(lost):
            reading.batches -= 1
            reading.ahead.appendleft(batch)

    def _recut(self, loop: FollowedLoop, engine: Engine) -> None:
        """Divides the rest of the epoch among the present ranks.

        Raises:
            CollectiveError: the rest cannot be divided among them. The script is run again.
        """
        batches, ranks = engine.settings.batches, present_ranks()
        for reading in self._readings:
            each, rest = divmod(reading.batches * loop.ranks[1], ranks[1])
            if rest or not (
                self._is_cut and is_cut_by_sampler(reading.loader, batches.micro_batch)
            ):
                raise CollectiveError("the batches of a DataLoader cannot be cut for other ranks")
            cut_for(reading.loader, *ranks)
            reading.restart(each)
        loop.kept.clear()
        self._micro_steps, loop.ranks = batches.micro_steps, ranks

    def _give_up(self) -> None:
        """Stops following the loop: after a fault the script is run again."""
        self.loop, self._has_given_up = None, True
        self._session.loop.yields_again = False
        self._session.engines.enable(None)

    def _follows(self, engine: Engine) -> bool:
        """Returns whether the script is training on loaders of its own, and not evaluating."""
        if self._has_given_up or (self._session.loop.divides_steps and not self._is_cut):
            return False
        has_own = engine.training_dataloader is None
        return has_own and engine.module.training and torch.is_grad_enabled()

    def _meet(self, loop: FollowedLoop) -> None:
        """Sends the schedules' states to new ranks. Collective.

        Raises:
            CollectiveError: the ranks' loops are at different positions.
        """
        places = [(reading.epochs, reading.batches) for reading in self._readings]
        reported = loop.meet(places) or []
        if any(reported_places != places for _, reported_places in reported):
            self._give_up()
            raise CollectiveError(
                f"the ranks' loops over DataLoaders are not at one place: {reported}"
            )
        knows = [knows_state for knows_state, _ in reported]
        if any(knows) and (states := loop.send(knows.index(True), self.schedules.states)):
            self.schedules.load(states)
            self.schedules.keep(loop.step)

    def _place(self) -> dict[str, Any]:
        """Returns the position of the loop and the schedules, for the training state."""
        loop, engine = self.loop, self._session.engine
        if self.stepwise.has_begun:
            return {"schedules": self.schedules.plain_states()}
        if loop is None or engine is None:
            return {}
        return {
            "ranks": loop.ranks[1],
            "micro_steps": engine.settings.batches.micro_steps,
            "places": {
                str(number): [reading.epochs, reading.batches, reading.rng]
                for number, reading in enumerate(self._readings)
            },
            "schedules": self.schedules.plain_states(),
        }

    def _find(self, found: dict[str, Any]) -> None:
        self._found = self.stepwise.found = found


class _Reading:
    """A script's iterations over one DataLoader, one at a time.

    Attributes:
        epochs: how many iterations have begun.
        batches: how many batches the present iteration has yielded, without those that are to be
            yielded again.
        rng: torch's random state at the start of the iteration.
        source: the iteration's batches; None if it yields nothing.
        ahead: the batches that come next: those to be yielded again, and then at most one that was
            read from `source`.
    """

    def __init__(self, loader: Any, loaders: OwnLoaders, engine: Engine) -> None:
        self.loader = loader
        self.epochs = self.batches = 0
        self.rng = torch.get_rng_state()
        self.source: Iterator[Any] | None = None
        self.ahead: deque[Batch] = deque()
        self._loaders = loaders
        self._engine = engine
        self._begin: Callable[[], Iterator[Any]] = lambda: iter(())

    def open(self, begin: Callable[[], Iterator[Any]]) -> None:
        """Begins another iteration, without batches until `source` is set."""
        self.epochs, self.batches = self.epochs + 1, 0
        self.rng = torch.get_rng_state()
        self.source = None
        self.ahead.clear()
        self._begin = begin

    def restart(self, batches: int) -> None:
        """Continues the iteration after its first `batches` batches."""
        self.batches = batches
        self.ahead.clear()
        if self.source is not None:
            with random_state_of(self.rng):
                self.source = iterate_behind(self.loader, batches, self._begin)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        loaders, engine = self._loaders, self._engine
        while not self._has_next():
            if not loaders.await_change(engine):
                loaders.end_epoch()
                raise StopIteration
        loaders.begin_batch(engine)
        if not self._has_next():  # the epoch was divided among other ranks, and has ended
            loaders.end_epoch()
            raise StopIteration
        batch = self.ahead.popleft()
        self.batches += 1
        if (loop := loaders.loop) is not None:
            loop.kept.setdefault(loop.step, []).append((self, batch))
        if batch.rng is not None:  # the engine may have gone back to before the batch was read
            restore_rng(batch.rng, engine.device)
        return batch.value()

    def _has_next(self) -> bool:
        if not self.ahead and self.source is not None:
            began_s = perf_counter()
            value = next(self.source, _END)
            self._engine.progress.data_wait_s += perf_counter() - began_s
            if value is not _END:
                batch = Batch(value, self.epochs, copies=self._loaders.copies)
                if not self.batches:
                    batch.rng = capture_rng(self._engine.device)
                self.ahead.append(batch)
        return bool(self.ahead)


def follow_own_loaders(session: JobSession) -> None:
    """Follows the loaders and schedules of the script that this thread is about to run."""
    _patch()
    session.loop.own_loaders = OwnLoaders(session)


@cache
def _patch() -> None:
    wrap(DataLoader, "__iter__", _iterate)
    for kind in (LRScheduler, ReduceLROnPlateau, SequentialLR, ChainedScheduler):
        wrap(kind, "__init__", _note_schedule)


def _iterate(session: JobSession, begin: Original, loader: Any) -> Any:
    """Replaces a DataLoader's `__iter__`."""
    loaders: OwnLoaders | None = session.loop.own_loaders
    if loaders is None or type(loader).__iter__ is not DataLoader.__iter__:  # Accelerate's
        return begin(loader)
    return loaders.iterate(loader, lambda: begin(loader))


def _note_schedule(
    session: JobSession, init: Original, schedule: Any, *args: Any, **options: Any
) -> None:
    """Replaces a schedule's `__init__`. A subclass and its base class both call it."""
    init(schedule, *args, **options)
    loaders: OwnLoaders | None = session.loop.own_loaders
    if loaders is None:
        return
    made = loaders.schedules.schedules
    if not any(known is schedule for known in made):
        made.append(schedule)
