"""Yields this rank's micro-batches in the global order, starting from the job's progress."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from queue import Empty
from typing import Any, Protocol

import torch
from torch.utils.data import IterableDataset, default_collate

from rayzero.engine.data.consumed import SAMPLES_PHASE
from rayzero.engine.data.micro_batches import MicroBatches, YieldedBatch
from rayzero.engine.data.prefetch import Prefetch, batch_to_device, closed_error
from rayzero.engine.data.sampling import MicroBatch, SampleOrder, StepSplit
from rayzero.engine.data.way_out import way_out
from rayzero.engine.device import get_device
from rayzero.engine.errors import CollectiveError, DataError, EngineError
from rayzero.engine.session import Reforming
from rayzero.engine.tensor_tree import map_tensors


class MapDataset(Protocol):
    """A map-style dataset: `dataset[i]` for i in [0, len(dataset)).

    `__getitems__(indices: list[int]) -> list[sample]` is used if the dataset has it.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class SampleSource(ABC):
    """The job's samples by their positions, which are sample cursors. Used by the thread that reads
    ahead.

    Attributes:
        length: samples of an epoch.
        may_wait: reading may have to wait for what others make, for any time: the training thread
            shows signs of life meanwhile.
    """

    length: int
    may_wait = False

    def begin(  # noqa: B027 -- a default
        self, cursor: int, split: StepSplit, check: Callable[[], None]
    ) -> None:
        """Reading begins with the step at that cursor, of which this rank reads that part, as of
        those after it."""

    @abstractmethod
    def read(
        self, step: int, part: MicroBatch, *, is_last: bool, check: Callable[[], None]
    ) -> tuple[list[int], Sequence[Any]]:
        """The numbers of the samples of a micro-batch, and the samples. They may have a method
        `collate()`, that makes what `default_collate` would make of them.

        Args:
            step: the cursor at which its step begins.
            is_last: of its step, on this rank.
            check: raises where reading is to stop; to be called while waiting.
        """


class DatasetSource(SampleSource):
    """The samples of a dataset in their global order. Raises DataError if it is not map-style, or
    empty."""

    def __init__(self, dataset: MapDataset, seed: int) -> None:
        self._dataset = dataset
        self._order = SampleOrder(dataset_length(dataset), seed)
        self.length = self._order.length

    def read(
        self, step: int, part: MicroBatch, *, is_last: bool, check: Callable[[], None]
    ) -> tuple[list[int], list[Any]]:
        indices = self._order.indices(step + part.start, part.read_count).tolist()
        return indices, fetch_samples(self._dataset, indices)


_SIGN_INTERVAL_S = 0.1
"""How often a training thread that waits for a source shows that it lives, and looks if it is to
leave its generation."""


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
    the previous one. Its thread ends when it is exhausted, closed or garbage-collected.

    Args:
        micro_batches: the engine's, with its progress, this rank's micro-batches of every step, and
            its session, which gets the phase "data".
        collate_fn: makes a batch of a list of samples; None: torch's `default_collate`.
        device: device of the batches; to CUDA through pinned memory, non-blocking.
        reforming: the engine's, for the training thread, before it reads a micro-batch.
    """

    def __init__(
        self,
        source: SampleSource,
        micro_batches: MicroBatches,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: torch.device | None = None,
        reforming: Reforming | None = None,
    ) -> None:
        self.progress = micro_batches.progress
        self._micro_batches = micro_batches
        self.device = device or torch.device("cpu")
        self._source = source
        self._session = micro_batches.session
        self._training_thread = threading.get_ident()
        self._collate = collate_fn or default_collate
        self._reforming = reforming
        self._prefetch: weakref.ref[Prefetch[tuple[YieldedBatch, Any]]] | None = None
        weakref.finalize(self, micro_batches.warn_at_end)  # at the interpreter's exit at the latest
        self._script_cursor = 0  # where a launched script's next epoch begins

    @property
    def micro_steps(self) -> int:
        """Number of micro-batches of a step."""
        return len(self._micro_batches.split)

    def __len__(self) -> int:
        """Number of micro-batches of the current epoch, from its first step."""
        cursor, batch = self.progress.sample_cursor, self.progress.global_batch
        into_epoch = cursor % self._source.length
        first = cursor - into_epoch // batch * batch
        return self._steps_to_epoch_end(first) * self.micro_steps

    def __iter__(self) -> Iterator[Any]:
        if not getattr(self._session, "replays_epochs", False):
            return self._iterate(None)
        end = self._script_cursor = self._script_epoch_end()
        left = end - self._micro_batches.next_place()[0]
        self.progress.script_lag = -left if left <= 0 else None
        left = max(0, left)
        return self._iterate(left // self.progress.global_batch)

    @property
    def is_replaying(self) -> bool:
        """Whether a launched script's next iteration is over an epoch that is finished already, and
        yields nothing: the script was run again and counts its epochs from the first."""
        script = getattr(self._session, "replays_epochs", False)
        return script and self._script_epoch_end() <= self.progress.sample_cursor

    def _script_epoch_end(self) -> int:
        """The sample cursor at the end of the epoch that a script's next iteration is."""
        start = max(self._script_cursor, self.progress.function_cursor)
        return start + self._steps_to_epoch_end(start) * self.progress.global_batch

    def steps(self, count: int) -> Iterator[Any]:
        """The micro-batches of exactly `count` optimizer steps from the cursor, across epochs."""
        return self._iterate(count)

    def until(self, step: int) -> Iterator[Any]:
        """The remaining micro-batches until `progress.step` is `step`."""
        _check_count(f"loader.until({step!r})", step)
        ahead = self._micro_batches.next_place()[0] - self.progress.sample_cursor
        finished = self.progress.step + ahead // self.progress.global_batch
        yield from self.steps(max(0, step - finished))

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers, from 0, of the remaining epochs of `count` in total.

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

    def _iterate(self, steps: int | None) -> Iterator[Any]:
        """Owns the prefetch thread: leaving this generator in any way closes it."""
        earlier = self._prefetch() if self._prefetch is not None else None
        if earlier is not None:
            earlier.close()
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
        """The micro-batches from a sample cursor to another one, until steps are split
        differently."""
        self._enter_phase(end)
        if self._micro_batches.split is not split:
            return
        steps = (end - cursor) // self.progress.global_batch
        closed = threading.Event()
        feed = Prefetch(self._read_ahead(split, cursor, done, steps, closed), closed=closed)
        self._prefetch = weakref.ref(feed)
        try:
            while (item := self._next_item(feed, split, end)) is not None:
                yielded, loaded = item
                batch = batch_to_device(loaded, self.device)
                self._micro_batches.add(iteration, yielded, batch)
                del item, yielded, loaded  # the batch in host memory
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
        """The next item; None at the end, or once steps are split differently."""
        while True:
            try:
                return feed.next_within(_SIGN_INTERVAL_S if self._source.may_wait else None)
            except StopIteration:
                return None
            except Empty:
                # Leaves the generation, or joins the next, if it has ended.
                self._enter_phase(end, SAMPLES_PHASE)
                if self._micro_batches.split is not split:
                    return None
            finally:
                self.progress.data_wait_s += feed.wait_s

    def _enter_phase(self, end: int, phase: str = "data") -> None:
        """The training thread is about to read, unless all steps until `end` are finished: not
        another thread, in which the script reads ahead. A finished one may be undone here."""
        reforming = self._reforming
        if threading.get_ident() != self._training_thread:
            return
        is_undone = reforming is not None and reforming.undoes_step
        if self.progress.sample_cursor >= end and not is_undone:
            return
        if self._session is not None:
            self._session.on_phase(phase)
        if reforming is not None:
            reforming.before_read(self)

    def _steps_to_epoch_end(self, cursor: int) -> int:
        """Steps from `cursor` to the first end of a step at or after the end of its epoch."""
        remaining = self._source.length - cursor % self._source.length
        return -(-remaining // self.progress.global_batch)

    def _read_ahead(
        self, split: StepSplit, cursor: int, done: int, steps: int, closed: threading.Event
    ) -> Iterator[tuple[YieldedBatch, Any]]:
        """Runs in the thread: batches in host memory, skipping `done` of the first step."""

        def check() -> None:
            if closed.is_set():
                raise closed_error()

        device = get_device(self.device)
        device.make_current()  # or pinning uses device 0
        self._source.begin(cursor, split, check)
        for step in range(steps):
            start = cursor + step * self.progress.global_batch
            for turn in range(done if step == 0 else 0, len(split)):
                part = split[turn]
                is_last = turn == len(split) - 1
                indices, samples = self._source.read(start, part, is_last=is_last, check=check)
                batch = self._collate_samples(indices, samples)
                del samples
                if device.asynchronous:
                    batch = map_tensors(batch, device.pin)
                yielded = YieldedBatch(
                    (start, turn),
                    part.weight,
                    own_indices=indices[: part.count],
                    is_last=is_last,
                    owner=self._micro_batches,
                    split=split,
                )
                yield yielded, batch

    def _collate_samples(self, indices: list[int], samples: Sequence[Any]) -> Any:
        try:
            if self._collate is default_collate and hasattr(samples, "collate"):
                return samples.collate()
            return self._collate(list(samples))
        except Exception as error:
            raise DataError(
                f"samples {indices} cannot be collated: {type(error).__name__}: {error}",
                "samples of one shape and type",
                "the dataset, or your own collate_fn",
            ) from error


def _check_count(call: str, count: Any) -> None:
    try:
        is_count = count >= 0
    except TypeError:
        is_count = False
    if not is_count:
        raise EngineError(f"{call} was called", "a number, 0 or more", "the call")


def dataset_length(dataset: object) -> int:
    name = type(dataset).__name__
    map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not map_style:
        raise DataError(
            f"the training data is a {name}, which can only be iterated",
            "a map-style dataset, with __len__ and __getitem__",
            f"training_data: {way_out(dataset)}",
        )
    try:
        length = len(dataset)  # type: ignore[arg-type]
    except Exception as error:
        seen = f"len() of the training data (a {name}) failed: {type(error).__name__}: {error}"
        raise DataError(seen, fix="correct the dataset, or the data behind it") from error
    if length < 1:
        raise DataError(f"the training data (a {name}) is empty", "one sample or more", "the data")
    return length


def fetch_samples(dataset: MapDataset, indices: list[int]) -> list[Any]:
    """The samples at `indices`; errors of the dataset name the failing sample."""
    failing = f"samples {indices}"
    try:
        if (get_items := getattr(dataset, "__getitems__", None)) is not None:
            return list(get_items(indices))
        samples = []
        for index in indices:
            failing = f"sample {index}"
            samples.append(dataset[index])
        return samples
    except Exception as error:
        raise DataError(
            f"{failing} of the training data could not be read: {type(error).__name__}: {error}",
            fix="correct the dataset, or the data behind it",
        ) from error
