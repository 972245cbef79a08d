"""Hands out this rank's micro-batches, in the global order, from wherever the job stands."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import IterableDataset, default_collate

from rayzero.engine.data.prefetch import Prefetch, batch_to_device, pin_batch
from rayzero.engine.data.sampling import SampleOrder, TrainingProgress, assign_step
from rayzero.engine.errors import DataError, EngineError
from rayzero.engine.session import current_session


class MapDataset(Protocol):
    """A map-style dataset: `dataset[i]` for i in [0, len(dataset)).

    One that offers `__getitems__(indices: list[int]) -> list[sample]` is read through it.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class LoaderPlan:
    """How a step is cut, and the part that is ours.

    Attributes:
        global_batch: samples of a step, over all ranks.
        micro_batch: the most samples that a rank takes at once.
        shares: each rank's share of a step's samples; empty for even shares.
    """

    global_batch: int
    micro_batch: int
    world_size: int
    rank: int
    shares: tuple[float, ...] = ()


@dataclass(frozen=True)
class _StepPart:
    """A micro-batch that was read.

    Attributes:
        place: (sample cursor of its step, number in the step): it grows from one to the next.
        own: the dataset indices of this rank's own samples in it; none if it is borrowed.
    """

    position: tuple[int, int]
    weight: float
    own_indices: list[int]
    batch: Any


class StepLoader:
    """This rank's micro-batches of one optimizer step after another, read ahead in a thread.

    `for batch in loader` goes from `progress.sample_cursor` to the end of the epoch, more exactly
    to the first end of a step at or after it: the last step of an epoch may take its remaining
    samples from the next one, so no sample is dropped and the global batch is constant. The next
    `for` goes on from the cursor. A step that was left half-way is gone on with.

    A training function that may be called again half-way asks for what is left: `until(step)`, or
    `epochs(count)`.

    `progress.weight` is set to the weight of each micro-batch as it is handed out, and the session
    is told which samples it consumes, of each micro-batch once. There is one iteration at a time: a
    new one closes the one before, and each ends its thread when it is exhausted, closed or
    garbage-collected.

    Args:
        dataset: map-style.
        order: of `len(dataset)` samples.
        plan: how a step is cut.
        progress: where the job stands; owned and moved by the engine.
        collate_fn: makes one batch of a list of samples; torch's `default_collate` when None.
        device: where the batches go. To a CUDA device they go through pinned memory, not blocking.

    Raises:
        DataError: the dataset is not map-style, or not as long as `order`.
        ConfigError: the plan does not make sense.
    """

    def __init__(
        self,
        dataset: MapDataset,
        order: SampleOrder,
        plan: LoaderPlan,
        progress: TrainingProgress,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        length = dataset_length(dataset)
        if length != order.length:
            raise DataError(
                f"the dataset holds {length} samples and the order is over {order.length}",
                "one length",
                "the dataset: it must not change while it is in use",
            )
        self.dataset = dataset
        self.plan = plan
        self.progress = progress
        self.device = device or torch.device("cpu")
        self._order = order
        self._collate = collate_fn or default_collate
        self._step_plan = assign_step(
            plan.global_batch, plan.world_size, plan.rank, plan.micro_batch, plan.shares
        )
        self._prefetch: weakref.ref[Prefetch[_StepPart]] | None = None
        self._last_reported = (-1, -1)  # the last place whose samples the session was told of

    @property
    def micro_steps(self) -> int:
        """Micro-batches of one step."""
        return len(self._step_plan)

    def __len__(self) -> int:
        """Micro-batches of the epoch in which the job stands, from its first step on."""
        cursor, batch = self.progress.sample_cursor, self.plan.global_batch
        into_epoch = cursor % self._order.length
        first = cursor - into_epoch // batch * batch
        return self._steps_to_epoch_end(first) * self.micro_steps

    def __iter__(self) -> Iterator[Any]:
        return self._micro_batches(None)

    def steps(self, count: int) -> Iterator[Any]:
        """The micro-batches of exactly `count` optimizer steps from the cursor on, over epochs."""
        return self._micro_batches(count)

    def until(self, step: int) -> Iterator[Any]:
        """The micro-batches until `progress.step` is `step`: what is left of so many in all."""
        yield from self.steps(max(0, step - self.progress.step))

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers, from 0, of the epochs that are left of `count` in all.

        Each is followed by `for batch in loader`, which hands out what is left of that epoch. One
        that was broken off is yielded again.

        Raises:
            EngineError: no step was finished between one epoch and the next.
        """
        seen = None
        while (cursor := self.progress.sample_cursor) < count * self._order.length:
            epoch = cursor // self._order.length
            if cursor == seen:
                raise EngineError(
                    f"epoch {epoch} was left without a finished step",
                    "for epoch in loader.epochs(count): for batch in loader: ...",
                    "break out of the outer loop too, or train on the batches",
                )
            seen = cursor
            yield epoch

    def _micro_batches(self, steps: int | None) -> Iterator[Any]:
        """Owns the thread: leaving this generator, by whatever way, closes it."""
        earlier = self._prefetch() if self._prefetch is not None else None
        if earlier is not None:
            earlier.close()
        session = current_session()
        cursor, done = self.progress.sample_cursor, self.progress.micro_step
        steps = self._steps_to_epoch_end(cursor) if steps is None else steps
        feed = Prefetch(self._read_ahead(cursor, done, steps))
        self._prefetch = weakref.ref(feed)
        try:
            if session is not None:
                session.on_phase("data")
            for portion in feed:
                self.progress.data_wait_s += feed.wait_s
                self.progress.micro_batch_weight = portion.weight
                if session is not None and portion.position > self._last_reported:
                    self._last_reported = portion.position
                    session.on_samples_consumed(portion.own_indices)
                yield batch_to_device(portion.batch, self.device)
                if session is not None:
                    session.on_phase("data")
        finally:
            feed.close()

    def _steps_to_epoch_end(self, cursor: int) -> int:
        """Steps from `cursor` until one ends at or after the end of the epoch it is in."""
        left = self._order.length - cursor % self._order.length
        return -(-left // self.plan.global_batch)

    def _read_ahead(self, cursor: int, done: int, steps: int) -> Iterator[_StepPart]:
        """What the thread runs: batches in host memory, without the first step's `done` first."""
        if self.device.type == "cuda":  # or pinning would open a context on the first device
            torch.cuda.set_device(self.device)
        for step in range(steps):
            start = cursor + step * self.plan.global_batch
            for turn in range(done if step == 0 else 0, self.micro_steps):
                part = self._step_plan[turn]
                indices = self._order.indices(start + part.start, part.read_count).tolist()
                batch = self._collate_samples(indices)
                if self.device.type == "cuda":
                    batch = pin_batch(batch)
                yield _StepPart((start, turn), part.weight, indices[: part.count], batch)

    def _collate_samples(self, indices: list[int]) -> Any:
        samples = _fetch_samples(self.dataset, indices)
        try:
            return self._collate(samples)
        except Exception as error:
            raise DataError(
                f"samples {indices} do not make a batch: {type(error).__name__}: {error}",
                "samples of one shape and type",
                "the dataset, or a collate_fn of your own",
            ) from error


def dataset_length(dataset: object) -> int:
    """The samples in a map-style dataset.

    Raises:
        DataError: it is not map-style, or empty.
    """
    name = type(dataset).__name__
    map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not map_style:
        raise DataError(
            f"the training data is a {name}, which can only be iterated",
            "a map-style dataset, with __len__ and __getitem__",
            "training_data: only samples with a number can be split over a changing set of workers",
        )
    length = len(dataset)  # type: ignore[arg-type]
    if length < 1:
        raise DataError(f"the training data (a {name}) is empty", "one sample or more", "the data")
    return length


def _fetch_samples(dataset: MapDataset, indices: Sequence[int]) -> list[Any]:
    """The samples at `indices`; an error of the dataset's own names the one it is about."""
    many = getattr(dataset, "__getitems__", None)
    if many is not None:
        try:
            return list(many(list(indices)))
        except Exception as error:
            raise _read_error(f"samples {list(indices)}", error) from error
    samples = []
    for index in indices:
        try:
            samples.append(dataset[index])
        except Exception as error:
            raise _read_error(f"sample {index}", error) from error
    return samples


def _read_error(what: str, error: Exception) -> DataError:
    return DataError(
        f"{what} of the training data could not be read: {type(error).__name__}: {error}",
        fix="the dataset, or the data behind it",
    )
