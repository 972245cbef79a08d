"""A script's loop over torch DataLoaders of its own, which continues through faults.

A survivor's DataLoader yields the batches of a lost step again. That of a new rank begins where the
lost rank's was: a finished epoch yields nothing, the current one its rest. Both need a script that
leaves its place to the loader, one that reads neither `engine.global_steps` nor a checkpoint before
its first step; and batches that belong to the step in which they are read. Where torch's
DistributedSampler orders them, they are cut for other ranks; else the loop continues only if the
worker keeps its rank and the number of ranks is the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import chain
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR
from torch.utils.data import DataLoader

from rayzero.engine.comm.process_group import all_gather_objects
from rayzero.engine.data.streams.positions import check_sampler
from rayzero.engine.engine import Engine
from rayzero.engine.errors import CollectiveError
from rayzero.engine.state.metadata import capture_rng, restore_rng
from rayzero.workers.launch.adapters import Original, wrap
from rayzero.workers.launch.kept_schedules import KeptSchedules
from rayzero.workers.launch.read_batches import (
    Batch,
    advance_sampler,
    check_ranks,
    cut_for,
    has_constant_batches,
    is_cut_by_sampler,
    iterate_behind,
    present_ranks,
    random_state_of,
)
from rayzero.workers.session import JobSession

_STATE = "rayzero.own_loader"
_END = object()


class OwnLoaders:
    """The DataLoaders that a script trains on. Used by the training thread.

    Attributes:
        schedules: those that the script has made, in their order.
        is_followed: whether the script stays in its loop; None: it has read nothing.
        copies: the script changes its batches in place.
        step: the one in which batches are read.
    """

    def __init__(self, session: JobSession) -> None:
        self.schedules = KeptSchedules()
        self.is_followed: bool | None = None
        self.copies = False
        self.step = 0
        self._session = session
        self._readings: list[_Reading] = []
        self._found: dict[str, Any] = {}  # in the restored state: the place of this rank
        self._is_cut = False  # by a DistributedSampler, which can cut for other ranks
        self._micro_steps, self._ranks = 0, (0, 0)
        self._first_step = self._met = 0
        self._seen = 0, 0
        self._knows_schedules = not session.assignment.survivors_stay
        session.registry.register(_STATE, self._place, self._find)

    def iterate(self, loader: Any, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """An iteration over a loader; `begin` begins it as torch does."""
        engine = self._session.engine
        if engine is None or not self._follows(engine):
            return begin()
        known = [number for number, it in enumerate(self._readings) if it.loader is loader]
        number = known[0] if known else len(self._readings)
        if not known:
            check_sampler(loader)
            self._readings.append(_Reading(loader, self, engine))
        reading = self._readings[number]
        reading.open(begin)
        if self._found:
            check_ranks(loader, self._found["ranks"])
        epoch, batches, rng = self._found.get("places", {}).get(str(number), (0, 0, None))
        if reading.epochs < epoch:
            with random_state_of(torch.get_rng_state()):
                advance_sampler(loader)
            engine.progress.script_lag = epoch - reading.epochs
            return iter(())
        engine.progress.script_lag = None
        if reading.epochs > epoch or not batches:
            reading.source = begin()
            return reading
        reading.rng, reading.batches = rng, self._own_batches(engine, batches)
        with random_state_of(rng):
            rest = iterate_behind(loader, reading.batches, begin)
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
        is_same = not (engine.survival.local_reason or self._has_changed(engine))
        if not self.is_followed or is_same or not self._follows(engine):
            return False
        engine.survival.await_group()
        if engine.progress.step > self.step:
            return False
        self._follow_step(engine)
        return True

    def begin_batch(self, engine: Engine) -> None:
        """Called before a batch is yielded. Waits for all ranks where some are new; finds the
        batches to be yielded again. Raises CollectiveError if there are some that cannot be: the
        script is run again."""
        session, progress = self._session, engine.progress
        if not self._follows(engine):
            return
        is_first = self.is_followed is None
        if is_first:
            self.step = self._first_step = session.restored_step
            self._seen = 0, self.generation
            self._met = self.generation if self._knows_schedules else 0
        asked = progress.place_asked_at
        if asked is not None and asked <= self._first_step and not self._found:
            self._give_up(engine)
            return
        if is_first:
            self._begin_to_follow(engine)
        session.on_phase("data")
        engine.survival.await_group()
        if is_first:
            given = getattr(engine, "lr_scheduler", None)  # goes back with the engine
            self.schedules[:] = [it for it in self.schedules if it is not given]
            self.schedules.catch_up(self._found.get("schedules", []))
            self.schedules.keep(progress.step)
        self._follow_step(engine)
        if self._met != self.generation:
            self._met = self.generation
            apart = ""
            with suppress(CollectiveError):  # the group broke: they meet in the next one
                apart = self._meet(engine)
            if apart:
                self._give_up(engine)
                raise CollectiveError(apart)

    def _begin_to_follow(self, engine: Engine) -> None:
        self.is_followed = True
        self._session.follow_loop(engine)
        batches = engine.settings.batches
        self._micro_steps, self._ranks = batches.micro_steps, present_ranks()
        self._is_cut = has_constant_batches(engine) and all(
            is_cut_by_sampler(it.loader, batches.micro_batch) for it in self._readings
        )

    def _follow_step(self, engine: Engine) -> None:
        """A step has ended, or was lost, or neither, since the last batch."""
        step = engine.progress.step
        if step > self.step:
            self._end_step(engine)
            self.schedules.keep(step)
        elif self._has_changed(engine):
            self._go_back(step)
        if self.is_followed and self._ranks != present_ranks():
            self._recut(engine)
        self.step, self._seen = step, (engine.progress.lost_steps, self.generation)

    def _end_step(self, engine: Engine) -> None:
        """Gives up where a step's batches were not read in it, as by a script that reads ahead."""
        kept = [it.kept.get(self.step, []) for it in self._readings]
        read_in_step = all(len(batches) in (0, self._micro_steps) for batches in kept)
        if any(kept) and not (read_in_step and engine.progress.step == self.step + 1):
            self._give_up(engine)
        if self.is_followed and self._is_cut and not self._session.loop.divides_steps:
            self._session.divide_step(self._micro_steps * self._ranks[1])
        self.copies = self.copies or any(it.is_changed for batches in kept for it in batches)
        oldest = engine.progress.step - self._session.steps_to_go_back
        for reading in self._readings:
            reading.kept = {step: it for step, it in reading.kept.items() if step >= oldest}

    def _go_back(self, step: int) -> None:
        """The job is at that step, which some batches were read for already."""
        for reading in self._readings:
            reading.go_back(step)
        if step < self.step and not any(reading.again for reading in self._readings):
            raise CollectiveError(f"the job went back to step {step}, whose batches were not kept")
        self.schedules.restore(step)

    def _recut(self, engine: Engine) -> None:
        """Cuts the epoch's rest for the present ranks. Raises CollectiveError where that cannot be:
        the script is run again."""
        batches, ranks = engine.settings.batches, present_ranks()
        for reading in self._readings:
            each, rest = divmod(reading.place()[1] * self._ranks[1], ranks[1])
            if rest or not (
                self._is_cut and is_cut_by_sampler(reading.loader, batches.micro_batch)
            ):
                raise CollectiveError("the batches of a DataLoader cannot be cut for other ranks")
            cut_for(reading.loader, *ranks)
            reading.restart(each)
        self._micro_steps, self._ranks = batches.micro_steps, ranks

    def _give_up(self, engine: Engine) -> None:
        """Stops following the loop: after a fault the script is run again."""
        self.is_followed = self._session.loop.yields_again = False
        self._session.engines.enable(None)
        for reading in self._readings:
            reading.kept.clear()

    @property
    def generation(self) -> int:
        return self._session.assignment.generation

    def _has_changed(self, engine: Engine) -> bool:
        """Whether a step was lost, or the ranks may be others, since the last batch."""
        return (engine.progress.lost_steps, self.generation) != self._seen

    def _follows(self, engine: Engine) -> bool:
        """Whether the script trains now, on loaders of its own."""
        if self.is_followed is False or (self._session.loop.divides_steps and not self._is_cut):
            return False
        has_own = engine.training_dataloader is None
        return has_own and engine.module.training and torch.is_grad_enabled()

    def _meet(self, engine: Engine) -> str:
        """Gives the schedules to new ranks. Returns in what their loops differ from those of the
        others; empty if they do not. Collective."""
        places = [reading.place() for reading in self._readings]
        reported = all_gather_objects((self._knows_schedules, places))
        if any(other != places for _, other in reported):
            return f"the ranks' loops over DataLoaders are not at one place: {reported}"
        knows = [it for it, _ in reported]
        sender = knows.index(True) if any(knows) else -1
        sent = all_gather_objects(self.schedules.states() if sender == dist.get_rank() else None)
        if not self._knows_schedules and (states := sent[sender]) is not None:
            self.schedules.load(states)
            self.schedules.keep(engine.progress.step)
            self._knows_schedules = True
        return ""

    def _place(self) -> dict[str, Any]:
        """Returns the loop's position, for the training state."""
        engine = self._session.engine
        if not self.is_followed or engine is None:
            return {}
        return {
            "ranks": self._ranks[1],
            "micro_steps": engine.settings.batches.micro_steps,
            "places": {
                str(number): [*reading.place(), reading.rng]
                for number, reading in enumerate(self._readings)
            },
            "schedules": self.schedules.plain_states(),
        }

    def _find(self, found: dict[str, Any]) -> None:
        self._found = found


class _Reading:
    """A script's iterations over one DataLoader, one at a time, and the batches that may be needed
    again.

    Attributes:
        epochs: iterations begun.
        batches: of the present iteration, that were yielded for the first time.
        rng: torch's random state where it began.
        source: its batches; None where it yields nothing.
        kept: by step in which they were read.
        again: to be yielded again.
    """

    def __init__(self, loader: Any, loaders: OwnLoaders, engine: Engine) -> None:
        self.loader = loader
        self.epochs = self.batches = 0
        self.rng = torch.get_rng_state()
        self.source: Iterator[Any] | None = None
        self.kept: dict[int, list[Batch]] = {}
        self.again: deque[Batch] = deque()
        self._loaders = loaders
        self._engine = engine
        self._begin: Callable[[], Iterator[Any]] = lambda: iter(())
        self._next: Batch | None = None
        self._read_in = 0  # the generation in which that was read

    def open(self, begin: Callable[[], Iterator[Any]]) -> None:
        """Begins another iteration, which has no batches yet."""
        self.epochs, self.batches = self.epochs + 1, 0
        self.rng = torch.get_rng_state()
        self.source = self._next = None
        self._begin = begin

    def place(self) -> tuple[int, int]:
        return self.epochs, self.batches - len(self.again)

    def restart(self, batches: int) -> None:
        """Continues behind the first `batches`."""
        self.kept.clear()
        self.again.clear()
        self.batches, self._next = batches, None
        if self.source is not None:
            with random_state_of(self.rng):
                self.source = iterate_behind(self.loader, batches, self._begin)

    def go_back(self, step: int) -> None:
        lost = [it for at in sorted(self.kept) if at >= step for it in self.kept.pop(at)]
        if any(batch.epoch != self.epochs or batch.is_changed for batch in lost):
            raise CollectiveError(
                f"the batches after step {step} cannot be read again: the script has changed them, "
                "or begun another epoch since"
            )
        self.again.extendleft(reversed(lost))

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
        is_late = bool(self.again) or self._read_in != loaders.generation
        if self.again:
            batch = self.again.popleft()
        elif self._next is not None:
            batch, self._next = self._next, None
            self.batches += 1
        if loaders.is_followed:
            self.kept.setdefault(loaders.step, []).append(batch)
        if is_late and batch.rng is not None:
            restore_rng(batch.rng, engine.device)
        return batch.value()

    def _has_next(self) -> bool:
        if not self.again and self._next is None and self.source is not None:
            began_s = perf_counter()
            value = next(self.source, _END)
            self._engine.progress.data_wait_s += perf_counter() - began_s
            if value is not _END:
                self._next = Batch(value, self.epochs, copies=self._loaders.copies)
                self._read_in = self._loaders.generation
                if not self.batches:
                    self._next.rng = capture_rng(self._engine.device)
        return bool(self.again) or self._next is not None


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
