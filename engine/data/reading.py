"""Reads a source, and makes its samples and micro-batches, in the thread that reads ahead.

A sample that cannot be made is *bad*. Up to `max_bad_samples` of a job are left out, as if their
loss were 0: the micro-batch is shorter, and its weight is the share of its good samples in the
global batch. So the result of a step depends on its samples only, not on which ranks had the bad
ones. A micro-batch without a good sample runs on the next good one with weight zero.

Bad samples are counted when their micro-batch is trained on: the step's vote sums the counts of the
ranks, and the sum is part of the training state (`TrainingProgress`).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from time import monotonic
from typing import Any

import torch
from torch.utils.data import default_collate

from rayzero.engine.config.sections import LoaderConfig
from rayzero.engine.data.loader_pool import LoaderPool, SampleTicket
from rayzero.engine.data.loader_process import BadSample, make_sample
from rayzero.engine.data.micro_batches import MicroBatches
from rayzero.engine.data.prefetch import closed_error
from rayzero.engine.data.sample_source import SampleSource
from rayzero.engine.data.sampling import MicroBatch, StepSplit, bad_samples_error
from rayzero.engine.data.yielded_batch import YieldedBatch
from rayzero.engine.device import get_device
from rayzero.engine.errors import DataError, named_errors
from rayzero.engine.tensor_tree import map_tensors

log = logging.getLogger("rayzero.engine")


@dataclass
class _BegunBatch:
    """A micro-batch whose raw values are read, and whose samples are being made."""

    step: int  # sample cursor at which its step begins
    turn: int  # number in its step
    part: MicroBatch
    numbers: list[int]
    raws: Sequence[Any]
    ticket: SampleTicket | None


class BatchReader:
    """Makes this rank's micro-batches in host memory.

    With `num_workers`, samples are made in processes, up to two for each process ahead of the next
    micro-batch. All iterations use the same processes.

    `read` runs in the thread of an iteration, `check_time` in the training thread.
    """

    def __init__(
        self,
        source: SampleSource,
        micro_batches: MicroBatches,
        collate: Callable[[list[Any]], Any],
        device: torch.device,
        config: LoaderConfig,
    ) -> None:
        self._source = source
        self._micro_batches = micro_batches
        self._collate = collate
        self._device = get_device(device)
        self._config = config
        self._bad = 0  # samples left out: of finished steps, and of this rank since then
        self._making: tuple[float, str] | None = None  # since when, and which samples
        self._pool: LoaderPool | None = None
        if source.maker is not None and config.num_workers:
            self._pool = LoaderPool(source.maker, source.seed, config)

    def read(
        self, split: StepSplit, cursor: int, done: int, steps: int, closed: threading.Event
    ) -> Iterator[tuple[YieldedBatch, Any]]:
        """Yields the micro-batches of `steps` steps from a sample cursor, without the first `done`
        of the first step. Raises EngineError once `closed` is set."""

        def check() -> None:
            if closed.is_set():
                raise closed_error()

        self._device.make_current()  # otherwise pinning uses device 0
        if self._pool is not None:
            self._pool.drop_tasks()
        self._source.begin(cursor, split, check)
        progress = self._micro_batches.progress
        self._bad = progress.bad_samples + progress.bad_in_step
        begun: deque[_BegunBatch] = deque()
        for step in range(steps):
            start = cursor + step * progress.global_batch
            for turn in range(done if step == 0 else 0, len(split)):
                begun.append(self._begin(start, turn, split, check))
                while begun and not self._waits_for_more(begun):
                    yield self._finish(begun.popleft(), split, check)
        for batch in begun:
            yield self._finish(batch, split, check)

    def check_time(self) -> None:
        """Raises DataError if the thread takes longer than `sample_timeout_s` to make a sample."""
        if (making := self._making) is None:
            return
        since_s, failing = making
        if monotonic() - since_s > self._config.sample_timeout_s:
            raise DataError(
                f"{failing} was not done within {self._config.sample_timeout_s:g} s",
                fix="correct the data, or set rayzero.loader.sample_timeout_s; with num_workers, "
                "up to max_bad_samples such samples are left out",
            )

    def close(self) -> None:
        """Ends the processes. Called while no iteration is running."""
        if self._pool is not None:
            self._pool.close()

    def _begin(
        self, start: int, turn: int, split: StepSplit, check: Callable[[], None]
    ) -> _BegunBatch:
        part, is_last = split[turn], turn == len(split) - 1
        numbers, raws = self._source.read(start, part, is_last=is_last, check=check)
        check()
        ticket = self._submit(start + part.start, raws)
        return _BegunBatch(start, turn, part, numbers, raws, ticket)

    def _submit(self, position: int, raws: Sequence[Any]) -> SampleTicket | None:
        return None if self._pool is None else self._pool.submit(position, list(raws))

    def _waits_for_more(self, begun: deque[_BegunBatch]) -> bool:
        """Returns whether another micro-batch is to be begun, to keep the processes busy, before
        the first of these is finished."""
        ahead = sum(len(batch.raws) for batch in islice(begun, 1, None))
        return self._pool is not None and ahead < 2 * self._config.num_workers

    def _finish(
        self, batch: _BegunBatch, split: StepSplit, check: Callable[[], None]
    ) -> tuple[YieldedBatch, Any]:
        made = self._make_samples(batch.raws, batch.ticket, check)
        count = batch.part.count
        skipped = []
        good = made  # without a maker none is bad; a lazy sequence of rows is not evaluated here
        if self._source.maker is not None:
            for number, raw, sample in zip(batch.numbers, batch.raws, made, strict=True):
                if isinstance(sample, BadSample) and count:
                    self._leave_out(raw, sample)
                    skipped.append(number)
            good = [sample for sample in made if not isinstance(sample, BadSample)]
        weight = batch.part.weight
        if skipped:
            weight = (count - len(skipped)) / self._micro_batches.progress.global_batch
        collated = self._collate_samples(batch.numbers, good or [self._find_filler(batch, check)])
        if self._device.asynchronous:
            collated = map_tensors(collated, self._device.pin)
        yielded = YieldedBatch(
            (batch.step, batch.turn),
            weight,
            own_indices=batch.numbers[:count],
            is_last=batch.turn == len(split) - 1,
            progress=self._micro_batches.progress,
            split=split,
            skipped=skipped,
        )
        return yielded, collated

    def _make_samples(
        self, raws: Sequence[Any], ticket: SampleTicket | None, check: Callable[[], None]
    ) -> Sequence[Any]:
        maker = self._source.maker
        if maker is None:
            return raws
        if self._pool is not None and ticket is not None:
            return self._pool.take(ticket, check)
        try:
            if (make_all := self._source.make_all) is not None:
                # `workers/stacks.py` reads this variable of the frame.
                failing = f"samples {raws} of the training data"
                self._making = monotonic(), failing
                try:
                    return list(make_all(list(raws)))
                except Exception:
                    log.debug("samples %s cannot be made together", raws, exc_info=True)
            samples = []
            for raw in raws:
                failing = self._source.describe(raw)
                self._making = monotonic(), failing
                samples.append(make_sample(maker, raw))
            return samples
        finally:
            self._making = None

    def _leave_out(self, raw: Any, bad: BadSample) -> None:
        """Counts a bad sample, and logs it. Raises DataError if there are too many."""
        self._bad += 1
        limit = self._config.max_bad_samples
        seen = f"{self._source.describe(raw)} cannot be used: {bad.reason}"
        if self._bad > limit:
            raise bad_samples_error(seen, self._bad, limit) from bad.cause
        log.warning("%s\n  it is left out: %d of at most %d", seen, self._bad, limit)

    def _find_filler(self, batch: _BegunBatch, check: Callable[[], None]) -> Any:
        """Returns the next good sample after a micro-batch. It has no weight, so bad samples before
        it do not count."""
        for offset in range(self._config.max_bad_samples + 1):
            position = batch.step + batch.part.start + batch.part.read_count + offset
            part = MicroBatch(0, 1, 0.0)
            _, raws = self._source.read(position, part, is_last=False, check=check)
            (sample,) = self._make_samples(raws, self._submit(position, raws), check)
            if not isinstance(sample, BadSample):
                return sample
        raise DataError(
            f"there is no sample that can be used after {self._source.describe(batch.raws[-1])}",
            fix="correct the data, or set rayzero.loader.max_bad_samples",
        )

    def _collate_samples(self, numbers: list[int], samples: Sequence[Any]) -> Any:
        with named_errors(
            lambda: f"samples {numbers} cannot be collated",
            "samples of one shape and type",
            "the dataset, or your own collate_fn",
        ):
            if self._collate is default_collate and hasattr(samples, "collate"):
                return samples.collate()
            return self._collate(list(samples))
