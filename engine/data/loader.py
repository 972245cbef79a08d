"""Yields this rank's micro-batches in the global order, starting from the job's progress."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from queue import Empty
from typing import Any

import torch
from torch.utils.data import default_collate

from rayzero.engine.config.sections import LoaderConfig
from rayzero.engine.data.consumed import OUTSIDE_PHASE, SAMPLES_PHASE
from rayzero.engine.data.micro_batches import MicroBatches
from rayzero.engine.data.prefetch import Prefetch, batch_to_device
from rayzero.engine.data.reading import BatchReader
from rayzero.engine.data.sample_source import SampleSource
from rayzero.engine.data.sampling import StepSplit
from rayzero.engine.data.yielded_batch import YieldedBatch
from rayzero.engine.errors import CollectiveError, EngineError
from rayzero.engine.session import Reforming, ScriptEpochs

_SIGN_INTERVAL_S = 0.1
"""How often a training thread that waits for a source shows that it lives, and checks whether it is
to leave its generation."""


class StepLoader:
    """This rank's micro-batches, step after step, read ahead in a thread.

    `for batch in loader` goes from `progress.sample_cursor` to the first end of a step at or after
    the end of the epoch: the last step of an epoch takes missing samples from the next one, so no
    sample is dropped and the global batch is constant. The next `for` continues from the cursor. A
    partly finished step is resumed.

    A training function that may be restarted midway asks for the remainder: `until(step)` or
    `epochs(count)`.

    The loop may read ahead, by any number of batches and in a thread of its own; it trains on them
    in their order, each once (`micro_batches`). There is one iteration at a time: a new one closes
    the previous one. The thread of an iteration ends when that is exhausted, closed or
    garbage-collected.

    Args:
        micro_batches: the engine's. They have its progress, this rank's part of every step, and
            its session, which gets the phase "data".
        collate_fn: makes a batch of a list of samples; None: torch's `default_collate`.
        device: device of the batches; copies to CUDA go through pinned memory, non-blocking.
        reforming: the engine's; the training thread calls it before it reads a micro-batch.
        config: how samples are made.
    """

    def __init__(
        self,
        source: SampleSource,
        micro_batches: MicroBatches,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: torch.device | None = None,
        reforming: Reforming | None = None,
        config: LoaderConfig | None = None,
    ) -> None:
        self.progress = micro_batches.progress
        self._micro_batches = micro_batches
        self.device = device or torch.device("cpu")
        self._source = source
        self._session = micro_batches.session
        self._epochs = self._session.epochs
        self._training_thread = threading.get_ident()
        self._reader = BatchReader(
            source,
            micro_batches,
            collate_fn or default_collate,
            self.device,
            config or LoaderConfig(),
        )
        self._reforming = reforming
        self._prefetch: weakref.ref[Prefetch[tuple[YieldedBatch, Any]]] | None = None
        weakref.finalize(self, micro_batches.warn_at_end)  # at the interpreter's exit at the latest
        self._script_cursor = 0  # where a launched script's next epoch begins

    @property
    def micro_steps(self) -> int:
        """Number of micro-batches of a step."""
        return len(self._micro_batches.split)

    def __len__(self) -> int:
        """Returns the number of micro-batches of the current epoch, from its first step."""
        cursor, batch = self.progress.sample_cursor, self.progress.global_batch
        into_epoch = cursor % self._source.length
        first = cursor - into_epoch // batch * batch
        return self._steps_to_epoch_end(first) * self.micro_steps

    def __iter__(self) -> Iterator[Any]:
        if self._epochs is None:
            return self._iterate(None)
        end = self._script_cursor = self._script_epoch_end()
        left = end - self._micro_batches.next_place()[0]
        if left <= 0:
            self.progress.leave_epoch_out(-left, peers_are_ahead=self._epochs.peers_are_ahead)
        else:
            self.progress.script_lag = None
        steps = max(0, left) // self.progress.global_batch
        return self._iterate_script_epoch(self._epochs, steps)

    def _iterate_script_epoch(self, epochs: ScriptEpochs, steps: int) -> Iterator[Any]:
        epochs.begin_epoch()
        yield from self._iterate(steps)
        epochs.end_epoch()

    @property
    def is_replaying(self) -> bool:
        """Whether a launched script's next iteration is over an epoch that is finished already, and
        yields nothing: the script was run again and counts its epochs from the first."""
        is_script = self._epochs is not None
        return is_script and self._script_epoch_end() <= self.progress.sample_cursor

    def _script_epoch_end(self) -> int:
        """Returns the sample cursor at the end of the epoch of a script's next iteration."""
        start = max(self._script_cursor, self.progress.function_cursor)
        return start + self._steps_to_epoch_end(start) * self.progress.global_batch

    def steps(self, count: int) -> Iterator[Any]:
        """Yields the micro-batches of exactly `count` optimizer steps from the cursor, across
        epochs."""
        return self._iterate(count)

    def until(self, step: int) -> Iterator[Any]:
        """Yields the remaining micro-batches until `progress.step` is `step`."""
        _check_count(f"loader.until({step!r})", step)
        ahead = self._micro_batches.next_place()[0] - self.progress.sample_cursor
        finished = self.progress.step + ahead // self.progress.global_batch
        yield from self.steps(max(0, step - finished))

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the numbers, from 0, of the remaining epochs of `count` in total.

        Follow each with `for batch in loader`, which yields the rest of that epoch. An epoch that
        was not completed is yielded again. Raises EngineError if no step was finished since the
        previous epoch was yielded.
        """
        _check_count(f"loader.epochs({count!r})", count)
        previous = None
        while (cursor := self._micro_batches.next_place()[0]) < count * self._source.length:
            epoch = cursor // self._source.length
            if cursor == previous:
                raise EngineError(
                    f"the loop over epoch {epoch} ended without a finished step",
                    "for epoch in loader.epochs(count): for batch in loader: ...",
                    "break out of the outer loop too, or train on the batches",
                )
            previous = cursor
            yield epoch

    def close(self) -> None:
        """Ends the running iteration, if any, and the processes that make samples. The next
        iteration starts new ones."""
        self._close_iteration()
        self._reader.close()

    def _close_iteration(self) -> None:
        earlier = self._prefetch() if self._prefetch is not None else None
        if earlier is not None:
            earlier.close()

    def _iterate(self, steps: int | None) -> Iterator[Any]:
        """Owns the prefetch thread: leaving this generator in any way closes it."""
        self._close_iteration()
        if self._is_training_thread and not self.progress.script_lag:
            self.progress.reach_place()
        iteration, cursor, done = self._micro_batches.begin_iteration()
        steps = self._steps_to_epoch_end(cursor) if steps is None else steps
        end = cursor + steps * self.progress.global_batch
        split = self._micro_batches.split
        yield from self._iterate_split(split, iteration, cursor, done, end)
        while self._micro_batches.split is not split:  # the ranks have changed meanwhile
            split, cursor = self._micro_batches.split, self.progress.sample_cursor
            if cursor >= end:
                raise CollectiveError(
                    "the last step of a loop over the loader was interrupted on this rank, but "
                    "finished by others: they do not wait for what follows the loop"
                )
            yield from self._iterate_split(split, iteration, cursor, 0, end)
        self._micro_batches.end_iteration(iteration)

    def _iterate_split(
        self, split: StepSplit, iteration: int, cursor: int, done: int, end: int
    ) -> Iterator[Any]:
        """Yields the micro-batches from the sample cursor `cursor` to `end`, without the first
        `done`. Ends earlier if steps are split differently."""
        self._enter_phase(end)
        if self._micro_batches.split is not split:
            return
        steps = (end - cursor) // self.progress.global_batch
        closed = threading.Event()
        feed = Prefetch(self._reader.read(split, cursor, done, steps, closed), closed=closed)
        self._prefetch = weakref.ref(feed)
        try:
            while (item := self._next_item(feed, split, end)) is not None:
                yielded, loaded = item
                batch = batch_to_device(loaded, self.device)
                self._micro_batches.add(iteration, yielded, batch)
                del item, yielded, loaded  # the batch in host memory
                if self._is_training_thread:
                    self._session.on_phase(OUTSIDE_PHASE)
                yield batch
                del batch
                self._enter_phase(end)
                if self._micro_batches.split is not split:
                    return
        finally:
            feed.close()

    def _next_item(
        self, feed: Prefetch[tuple[YieldedBatch, Any]], split: StepSplit, end: int
    ) -> tuple[YieldedBatch, Any] | None:
        """Returns the next item; None at the end, or once steps are split differently."""
        while True:
            try:
                return feed.next_within(_SIGN_INTERVAL_S)
            except StopIteration:
                return None
            except Empty:
                self._reader.check_time()
                if not self._source.may_wait:
                    continue
                # If the generation has ended, this leaves it, or joins the next one.
                self._enter_phase(end, SAMPLES_PHASE)
                if self._micro_batches.split is not split:
                    return None
            finally:
                self.progress.data_wait_s += feed.wait_s

    @property
    def _is_training_thread(self) -> bool:
        """Whether the training thread is running, not a thread of the script that reads ahead."""
        return threading.get_ident() == self._training_thread

    def _enter_phase(self, end: int, phase: str = "data") -> None:
        """Called before a read. The training thread reports a phase and waits for another process
        group if this one is broken; but not if all steps until `end` are finished, unless the last
        one is to be undone."""
        reforming = self._reforming
        if not self._is_training_thread:
            return
        is_undone = reforming is not None and reforming.undoes_step
        if self.progress.sample_cursor >= end and not is_undone:
            return
        self._session.on_phase(phase)
        if reforming is not None:
            reforming.before_read(self)

    def _steps_to_epoch_end(self, cursor: int) -> int:
        """Returns the steps from `cursor` to the first step end at or after its epoch's end."""
        remaining = self._source.length - cursor % self._source.length
        return -(-remaining // self.progress.global_batch)


def _check_count(call: str, count: Any) -> None:
    try:
        is_count = count >= 0
    except TypeError:
        is_count = False
    if not is_count:
        raise EngineError(f"{call} was called", "a number, 0 or more", "the call")
