"""A script's loop over torch DataLoaders of its own, which continues through faults.

A survivor's is a `FollowedLoop`. A new rank's begins where the lost rank's was: a finished epoch
yields nothing, the current one its rest. Both need a script that leaves its place to the loader,
one that reads neither `engine.global_steps` nor a checkpoint before its first step; and batches
that belong to the step in which they are read. Where torch's DistributedSampler orders them, they
are cut for other ranks; else the loop continues only if the worker keeps its rank and the number of
ranks is the same.
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
from rayzero.workers.launch.kept_schedules import KeptSchedules
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
        schedules: those that the script has made, in their order.
        loop: in which the script stays; None before it has read anything, and where it does not.
        copies: the script changes its batches in place.
    """

    def __init__(self, session: JobSession) -> None:
        self.schedules = KeptSchedules()
        self.loop: FollowedLoop | None = None
        self.copies = False
        self._session = session
        self._readings: list[_Reading] = []
        self._found: dict[str, Any] = {}  # in the restored state: the place of this rank
        self._is_cut = False  # by a DistributedSampler, which can cut for other ranks
        self._micro_steps = self._first_step = 0
        self._has_given_up = False
        # Finished and lost steps, and the generation, by `follow_schedules`.
        self._seen: tuple[int, int, int] | None = None
        session.registry.register(_STATE, self._place, self._find)

    def iterate(self, loader: Any, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """An iteration over a loader; `begin` begins it as torch does."""
        engine = self._session.engine
        if engine is None or not self._follows(engine):
            return begin()
        reading = next((it for it in self._readings if it.loader is loader), None)
        if reading is None:
            check_sampler(loader)
            reading = _Reading(loader, self, engine)
            self._readings.append(reading)
        reading.open(begin)
        if self._found:
            check_ranks(loader, self._found["ranks"])
        number = str(self._readings.index(reading))
        epoch, batches, rng = self._found.get("places", {}).get(number, (0, 0, None))
        if reading.epochs < epoch:
            leave_out_epoch(loader, reading.epochs)
            engine.progress.script_lag = epoch - reading.epochs
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
            engine.progress.script_lag = int(self._session.assignment.survivors_stay)
            return iter(())
        reading.source = chain([first], rest)
        return reading

    def _own_batches(self, engine: Engine, batches: int) -> int:
        """This rank's part of what `batches` of each rank of the restored state were."""
        ranks = present_ranks()[1]
        if has_constant_batches(engine) or ranks == self._found["ranks"]:
            return int(batches * self._found["ranks"] // ranks)
        return batches // int(self._found["micro_steps"]) * engine.settings.batches.micro_steps

    def await_change(self, engine: Engine) -> bool:
        """Called where an epoch is over: whether its last steps were lost since, or the ranks are
        others. Waits for all ranks if some are missing; they meet in the next epoch."""
        loop = self.loop
        is_same = loop is None or not (engine.survival.local_reason or loop.has_changed)
        if loop is None or is_same or not self._follows(engine):
            return False
        engine.survival.await_group()
        if engine.progress.step > loop.step:
            return False
        self._follow_step(loop, engine)
        return True

    def begin_batch(self, engine: Engine) -> None:
        """Called before a batch is yielded. Waits for all ranks where some are new; finds the
        batches to be yielded again. Raises CollectiveError if there are some that cannot be: the
        script is run again."""
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

    def follow_schedules(self, engine: Engine) -> None:
        """Called where a step may begin: the script's schedules go where the job goes, if its loop
        is over the loader of `training_data=`. Raises CollectiveError where they cannot: the script
        is run again."""
        if engine.training_dataloader is None or self._has_given_up:
            return
        progress, seen = engine.progress, self._seen
        asks = progress.place_asked_at is not None  # a new worker's may, after finished epochs
        if seen is None and asks and not self._found:
            self._has_given_up = True
            return
        self._seen = progress.step, progress.lost_steps, self._session.assignment.generation
        if seen is None:
            self._begin_schedules(engine)
        if seen is None or progress.step > seen[0]:
            self.schedules.keep(progress.step)
        elif self._seen != seen and self.schedules:  # the step begins again, or an earlier one
            self.schedules.restore(progress.step)

    def _begin_schedules(self, engine: Engine) -> None:
        given = getattr(engine, "lr_scheduler", None)  # goes back with the engine
        self.schedules[:] = [it for it in self.schedules if it is not given]
        self.schedules.catch_up(self._found.get("schedules", []))

    def _begin_to_follow(self, engine: Engine) -> FollowedLoop:
        self._session.follow_loop(engine)
        self._begin_schedules(engine)
        self.loop = FollowedLoop(self._session, engine, self.schedules)
        batches = engine.settings.batches
        self._micro_steps = batches.micro_steps
        self._is_cut = has_constant_batches(engine) and all(
            is_cut_by_sampler(it.loader, batches.micro_batch) for it in self._readings
        )
        return self.loop

    def _follow_step(self, loop: FollowedLoop, engine: Engine) -> None:
        """A step has ended, or was lost, or neither, since the last batch."""
        began, read = loop.step, loop.kept.get(loop.step, [])
        has_changed = loop.follow()
        if loop.step > began:
            self._end_step(loop, began, read)
        elif has_changed:
            self._go_back(loop, began)
        if self.loop is not None and loop.ranks != present_ranks():
            self._recut(loop, engine)

    def _end_step(self, loop: FollowedLoop, began: int, read: list[tuple[_Reading, Batch]]) -> None:
        """Gives up where a step's batches were not read in it, as by a script that reads ahead."""
        counts = Counter(id(reading) for reading, _ in read)
        in_step = loop.step == began + 1 and {*counts.values()} == {self._micro_steps}
        if read and not in_step:
            self._give_up()
        elif self._is_cut and not self._session.loop.divides_steps:
            self._session.divide_step(self._micro_steps * loop.ranks[1])
        self.copies = self.copies or any(batch.is_changed for _, batch in read)

    def _go_back(self, loop: FollowedLoop, began: int) -> None:
        """The job is at a step which some batches were read for already. They are yielded again."""
        lost = [it for at in sorted(loop.kept) if at >= loop.step for it in loop.kept.pop(at)]
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
        """Cuts the epoch's rest for the present ranks. Raises CollectiveError where that cannot be:
        the script is run again."""
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
        """Whether the script trains now, on loaders of its own."""
        if self._has_given_up or (self._session.loop.divides_steps and not self._is_cut):
            return False
        has_own = engine.training_dataloader is None
        return has_own and engine.module.training and torch.is_grad_enabled()

    def _meet(self, loop: FollowedLoop) -> None:
        """Gives the schedules to new ranks. Raises CollectiveError if their loops are elsewhere
        than those of the others. Collective."""
        places = [(reading.epochs, reading.batches) for reading in self._readings]
        reported = loop.meet(places) or []
        if any(other != places for _, other in reported):
            self._give_up()
            raise CollectiveError(
                f"the ranks' loops over DataLoaders are not at one place: {reported}"
            )
        knows = [it for it, _ in reported]
        if any(knows) and (states := loop.send(knows.index(True), self.schedules.states)):
            self.schedules.load(states)
            self.schedules.keep(loop.step)

    def _place(self) -> dict[str, Any]:
        """Returns the loop's position, for the training state."""
        loop, engine = self.loop, self._session.engine
        if self._seen is not None:
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
        self._found = found


class _Reading:
    """A script's iterations over one DataLoader, one at a time.

    Attributes:
        epochs: iterations begun.
        batches: of the present iteration, that were yielded, less those to be yielded again.
        rng: torch's random state where it began.
        source: its batches; None where it yields nothing.
        ahead: the next ones: those to be yielded again, and one that was read.
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
        """Begins another iteration, which has no batches yet."""
        self.epochs, self.batches = self.epochs + 1, 0
        self.rng = torch.get_rng_state()
        self.source = None
        self.ahead.clear()
        self._begin = begin

    def restart(self, batches: int) -> None:
        """Continues behind the first `batches`."""
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
                raise StopIteration
        loaders.begin_batch(engine)
        if not self._has_next():  # cut for other ranks
            raise StopIteration
        batch = self.ahead.popleft()
        self.batches += 1
        if (loop := loaders.loop) is not None:
            loop.kept.setdefault(loop.step, []).append((self, batch))
        if batch.rng is not None:  # the engine may have gone back to where it was not read
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
    """Follows the script that this thread is about to run."""
    _patch()
    session.loop.own_loaders = OwnLoaders(session)


@cache
def _patch() -> None:
    wrap(DataLoader, "__iter__", _iterate)
    for kind in (LRScheduler, ReduceLROnPlateau, SequentialLR, ChainedScheduler):
        wrap(kind, "__init__", _note_schedule)


def _iterate(session: JobSession, begin: Original, loader: Any) -> Any:
    """A DataLoader's `__iter__`."""
    loaders: OwnLoaders | None = session.loop.own_loaders
    if loaders is None or type(loader).__iter__ is not DataLoader.__iter__:  # Accelerate's
        return begin(loader)
    return loaders.iterate(loader, lambda: begin(loader))


def _note_schedule(
    session: JobSession, init: Original, schedule: Any, *args: Any, **options: Any
) -> None:
    """A schedule's `__init__`, which one of a subclass calls, too."""
    init(schedule, *args, **options)
    loaders: OwnLoaders | None = session.loop.own_loaders
    if loaders is not None and not any(it is schedule for it in loaders.schedules):
        loaders.schedules.append(schedule)
