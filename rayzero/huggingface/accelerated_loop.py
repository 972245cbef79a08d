"""Lets a script's loop over an Accelerate loader continue at the job's step, and after faults.

A script that begins in a new worker begins its loops from the first epoch. Finished epochs yield
nothing, the current epoch yields the batches that are left. After a fault on other ranks, a
`FollowedLoop` continues the loop.
"""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Iterator
from importlib import import_module
from typing import Any

from torch.utils.data import IterableDataset

from rayzero.engine.engine import Engine
from rayzero.engine.errors import CollectiveError
from rayzero.engine.state.metadata import capture_rng, restore_rng
from rayzero.huggingface.scripted_steps import ScriptedSteps, SeveralSteps
from rayzero.workers.launch.adapters import Original, wrap
from rayzero.workers.launch.followed_loop import FollowedLoop, present_ranks
from rayzero.workers.launch.kept_schedules import KeptSchedules
from rayzero.workers.launch.read_batches import keep_seed, leave_out_epoch
from rayzero.workers.session import JobSession

_wrapped = set[type]()


class Place:
    """The position of a script's loop over a loader.

    Args:
        loader: as `accelerator` has prepared it.
        missed_steps: how many finished steps the loop has not come to.
        batches: number of batches of a step, over all ranks.
        ranks: number of ranks of the first generation.

    Attributes:
        loaded_step: step of the checkpoint that the script of a new worker has loaded.
        schedules: torch schedules that the engine does not have.
    """

    def __init__(
        self,
        session: JobSession,
        accelerator: Any,
        loader: Any,
        missed_steps: int,
        *,
        batches: int,
        ranks: int,
    ) -> None:
        self.missed_steps = missed_steps
        self.loaded_step: int | None = None
        self.schedules = KeptSchedules()
        self._session = session
        self._accelerator = accelerator
        self._loader = loader
        self._batches = batches
        self._marks_steps = batches <= ranks

    @property
    def _step_batches(self) -> int:
        """This rank's number of batches of a step."""
        return self._batches // present_ranks()[1]

    def follow(self, loader: Any, skipped: int = 0) -> None:
        """Makes iterations over a loader begin at this place, after the `skipped` batches of an
        epoch that the script skips. A drain takes effect where the script asks for a further step's
        first batch."""
        if (kind := type(loader)) not in _wrapped:
            _wrapped.add(kind)
            wrap(kind, "__iter__", _iterate)
        loader.rayzero_place = self, skipped

    def skipped_by_script(self, batches: int) -> int:
        """Returns how many batches of an epoch to skip when the script asks to skip `batches`. The
        script may have counted these on another number of ranks, so if it has loaded a checkpoint,
        the step of that counts."""
        if self.loaded_step is None or not batches or _is_iterable(self._loader):
            return batches
        return self.loaded_step % self._steps(len(self._loader)) * self._step_batches

    def _steps(self, batches: int) -> int:
        return math.ceil(batches / self._step_batches)

    def iterate(self, engine: Engine, loader: Any, begin: Original, skipped: int) -> Iterator[Any]:
        """Runs one iteration of the place's loader, or of a loader of the rest of an epoch, after
        `skipped` batches."""
        epochs = self._session.loop.epochs
        epochs.begin_epoch()
        if _is_iterable(loader):
            is_left_out = yield from self._read_through(engine, begin(loader))
        else:
            is_left_out = yield from self._read_epoch(engine, loader, begin, skipped)
        if is_left_out:
            ahead = self.missed_steps
            engine.progress.leave_epoch_out(ahead, peers_are_ahead=epochs.peers_are_ahead)
        epochs.end_epoch()

    def _read_epoch(
        self, engine: Engine, loader: Any, begin: Original, skipped: int
    ) -> Generator[Any, None, bool]:
        """Yields the batches that the job has not trained on. Returns whether there is none."""
        steps = self._steps(len(self._loader) - skipped)
        done = min(self.missed_steps, steps)
        self.missed_steps -= done
        if done == steps:
            leave_out(loader)  # a sampler's generator advances from epoch to epoch
            return True
        engine.progress.script_lag = None
        order = _agree_on_order(loader) if self._session.loop.yields_again else None
        loop = FollowedLoop(self._session, engine, self.schedules)
        first_step, skipped_steps = loop.step - done, skipped // self._step_batches
        batches = begin(loader)
        if done:
            done_batches = skipped + done * self._step_batches
            engine.progress.reach_place()
            batches = self._rest(loader, engine, done_batches, agreed=False)
        while (yield from self._read_generation(loop, batches)):
            done = loop.step - first_step
            if done < 0:
                raise CollectiveError(f"the job went back by {-done} steps, before this epoch")
            loader.end()
            self._recut()
            if order is not None:
                loader.synchronized_generator.set_state(order)
            done_batches = (skipped_steps + done) * self._step_batches
            batches = self._rest(loader, engine, done_batches, agreed=True)
        return False

    def _read_generation(
        self, loop: FollowedLoop, batches: Iterator[Any]
    ) -> Generator[Any, None, bool]:
        """Yields batches, until they are to be read again for other ranks; returns whether they
        are."""
        for number, batch in enumerate(batches, 1):
            self._mark_batch(ends_step=number % self._step_batches == 0)
            yield batch
            self._check_stepped()
            if loop.follow():
                batches.close()  # type: ignore[attr-defined]
                return True
        return False

    def _read_through(self, engine: Engine, batches: Iterator[Any]) -> Generator[Any, None, bool]:
        """Reads an iterable's batches, and yields those that the job has not trained on. Returns
        whether there is none."""
        read, missed = 0, self.missed_steps * self._step_batches
        for batch in batches:
            if read > missed:
                self._check_stepped()
            self._session.on_phase("data")
            read += 1
            if read > missed:
                self.missed_steps = 0
                engine.progress.script_lag = None
                engine.progress.reach_place()
                yield batch
        is_left_out = missed > 0 and read <= missed
        if is_left_out:
            self.missed_steps -= min(self.missed_steps, self._steps(read))
        return is_left_out

    def _mark_batch(self, *, ends_step: bool) -> None:
        """Does what `accumulate` does, for a script that needed no accumulation on its first ranks:
        on fewer ranks a step has several batches, and the script calls `step` for each."""
        state = self._accelerator.gradient_state
        if self._marks_steps:
            at_end = state.sync_with_dataloader and state.end_of_dataloader
            state._set_sync_gradients(bool(ends_step or at_end))

    def _check_stepped(self) -> None:
        """Called where the script takes a further batch: see `ScriptedSteps.check_stepped`."""
        scripted = self._accelerator.deepspeed_engine_wrapped
        if isinstance(scripted, ScriptedSteps | SeveralSteps):
            scripted.check_stepped()

    def _recut(self) -> None:
        """Counts and cuts for the present ranks. Called where these may have changed."""
        count_ranks(self._accelerator)
        self._accelerator.gradient_accumulation_steps = self._step_batches
        self._accelerator.step = 0

    def _rest(
        self, loader: Any, engine: Engine, done_batches: int, *, agreed: bool
    ) -> Iterator[Any]:
        """Yields the batches of the epoch after the first `done_batches`."""
        yield from read_behind(self._loader, done_batches, loader.iteration, engine, agreed=agreed)
        loader.iteration += 1


def _iterate(session: JobSession, begin: Original, loader: Any) -> Any:
    """Replaces a loader's `__iter__`."""
    place, skipped = getattr(loader, "rayzero_place", (None, 0))
    if place is None or session.engine is None:
        return begin(loader)
    return place.iterate(session.engine, loader, begin, skipped)


def _is_iterable(loader: Any) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def place_of(loader: Any) -> Place | None:
    place, _ = getattr(loader, "rayzero_place", (None, 0))
    return place


def skip_from_place(_: JobSession, skip: Original, dataloader: Any, num_batches: int = 0) -> Any:
    """Replaces `skip_first_batches`, which makes another loader."""
    place = place_of(dataloader)
    if place is None:
        return skip(dataloader, num_batches)
    skipped = place.skipped_by_script(num_batches)
    rest = skip(dataloader, skipped)
    place.follow(rest, skipped)
    return rest


def can_read_again(loader: Any, *, by_epoch: bool = False) -> bool:
    """Returns whether an epoch's batches can be read again, cut for other ranks: a sampler cuts
    them, and repeats their order. `by_epoch`: the order follows from the epoch's number alone."""
    shard: Any = getattr(loader, "batch_sampler", None)
    if type(shard).__name__ != "BatchSamplerShard" or shard.split_batches:
        return False
    sampler: Any = getattr(shard.batch_sampler, "sampler", None)
    if type(sampler).__name__ in ("SeedableRandomSampler", "SequentialSampler", "StreamSampler"):
        return True
    generator = getattr(sampler, "generator", None)
    return not by_epoch and generator is not None and generator is loader.synchronized_generator


def count_ranks(accelerator: Any) -> None:
    """Makes Accelerate count the present ranks from now on, and cut batches for them."""
    states, loaders = import_module("accelerate.state"), import_module("accelerate.data_loader")
    rank, ranks = present_ranks()
    for state in (states.PartialState(), states.AcceleratorState()):
        state.num_processes, state.process_index = ranks, rank
        state.local_process_index = int(os.environ["LOCAL_RANK"])
    for loader in accelerator._dataloaders:
        if isinstance(sampler := loader.batch_sampler, loaders.BatchSamplerShard):
            sampler.num_processes, sampler.process_index = ranks, rank


def _agree_on_order(loader: Any) -> Any:
    """Returns the state in which the generator of the loader's sampler begins an epoch; None if it
    has no generator. Collective, as the loader's own iteration."""
    if (generator := loader.synchronized_generator) is None:
        return None
    import_module("accelerate.utils").synchronize_rng_states(loader.rng_types, generator)
    return generator.get_state()


def leave_out(loader: Any) -> None:
    """Leaves out an epoch that the job has trained on."""
    loader.iteration += 1
    leave_out_epoch(loader, loader.iteration)
    if loader.persistent_workers:
        keep_seed(loader.base_dataloader)


def read_behind(
    loader: Any, batches: int, epoch: int, engine: Engine, *, agreed: bool
) -> Iterator[Any]:
    """Yields an epoch's batches after the first `batches`. A new iteration draws a seed for its
    workers. An epoch that has begun has drawn that seed before, so the random states are kept; so
    is the generator of a loader whose workers persist.

    `agreed`: the ranks have agreed on the state of the sampler's generator before.
    """
    rest = import_module("accelerate").skip_first_batches.__wrapped__(loader, batches)
    rest.iteration = epoch
    if epoch and loader.persistent_workers:
        keep_seed(rest.base_dataloader)
    if agreed:
        rest.rng_types = None
    rng = capture_rng(engine.device) if batches else None
    try:
        for batch in rest:
            if rng is not None:
                restore_rng(rng, engine.device)
                rng = None
            yield batch
    finally:
        rest.end()
