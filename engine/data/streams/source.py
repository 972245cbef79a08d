"""Streams of blocks as training data: their description, and the source of a `StepLoader`."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rayzero.engine.data.sample_source import Register, SampleSource
from rayzero.engine.data.sampling import Integers, MicroBatch, StepSplit, TrainingProgress
from rayzero.engine.data.streams.block import BlockSource, describe_block
from rayzero.engine.data.streams.cache import BlockCache, Key, ReadAhead
from rayzero.engine.data.streams.identity import check_identity
from rayzero.engine.data.streams.mixture import MixSchedule
from rayzero.engine.data.streams.order import BlockOrder, Places, StreamOrder
from rayzero.engine.data.streams.rows import BlockRows, RowBatch
from rayzero.engine.errors import check_positive, named_errors
from rayzero.engine.redact import redact_url

STATE_NAME = "rayzero.stream"
"""The name of the registered state with all values that the order of the samples depends on."""

_TURN_BITS = 48  # of a sort key: the turn of a block; the source is in the bits above

Transform = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class StreamPart:
    """One source of a stream. `name` is its name in a mixture, for metrics."""

    source: BlockSource
    window: int
    transform: Transform | None
    name: str


@dataclass(frozen=True)
class Mixture:
    """How the parts of a stream are mixed: see `mix`."""

    weights: Mapping[int, tuple[float, ...]]  # by the step from which they hold
    max_epochs: tuple[float | None, ...]

    def schedule(self, lengths: Sequence[int], batch: int) -> MixSchedule:
        """Returns the schedule of sources with `lengths` rows, in steps of `batch` samples."""
        limits = [
            None if epochs is None else max(1, int(epochs * length))
            for epochs, length in zip(self.max_epochs, lengths, strict=True)
        ]
        weights = {step * batch: weights for step, weights in self.weights.items()}
        return MixSchedule(lengths, weights, limits)


@dataclass(frozen=True)
class BlockStream:
    """Training data in blocks: what `stream` and `mix` return, to be given as `training_data`."""

    parts: tuple[StreamPart, ...]
    cache_bytes: int
    threads: int
    read_timeout_s: float
    mixture: Mixture | None = field(default=None)

    def __post_init__(self) -> None:
        for part in self.parts:
            check_positive(f"stream({part.source.name!r})", shuffle_window=part.window)
        check_positive("stream() or mix()", whole=False, cache_bytes=self.cache_bytes)
        check_positive("stream() or mix()", whole=False, read_timeout_s=self.read_timeout_s)
        check_positive("stream() or mix()", threads=self.threads)

    def order(self, seed: int, batch: int) -> StreamOrder:
        """Returns the order of the samples in a job of this seed that began with this
        `train_batch_size`. `check_ledger` takes it, too. Raises DataError if a source has no rows.
        """
        counts = [part.source.counts for part in self.parts]
        lengths = [int(np.sum(rows)) for rows in counts]
        schedule = None if self.mixture is None else self.mixture.schedule(lengths, batch)
        strata = np.array([batch])  # the rows of each source in a step
        if schedule is not None:
            strata = np.bincount(schedule.split(0, batch)[0], minlength=len(lengths)).clip(1)
        orders = [
            BlockOrder(counts[number], seed + number, part.window, int(strata[number]))
            for number, part in enumerate(self.parts)
        ]
        return StreamOrder(orders, schedule, batch)

    def identity(self, seed: int) -> dict[str, Any]:
        """Returns the values that the order depends on, by the names that errors use."""
        identity: dict[str, Any] = {"seed": str(seed)}
        for part in self.parts:  # sources of a mixture may have one name, such as "ray"
            counts, name = part.source.counts, redact_url(part.name)
            identity[f"blocks and rows of {name!r}"] = f"{len(counts)} and {np.sum(counts)}"
            identity[f"shuffle_window of {name!r}"] = str(part.window)
            identity[f"fingerprint of the data of {name!r}"] = part.source.fingerprint
        if self.mixture is not None:
            identity["sources"] = ", ".join(redact_url(part.name) for part in self.parts)
            identity["weights by step"] = str(dict(sorted(self.mixture.weights.items())))
            identity["max_epochs"] = str(self.mixture.max_epochs)
        return identity


class StreamRow(NamedTuple):
    """One row of a block, of which a sample is made."""

    source: int
    block: int
    row: int
    values: dict[str, Any]


def transform_row(transforms: Sequence[Transform | None], row: StreamRow) -> Any:
    transform = transforms[row.source]
    return row.values if transform is None else transform(row.values)


class StreamSource(SampleSource):
    """A stream as the source of a `StepLoader`. The values that its order depends on are registered
    with the training state, and compared when that is loaded.

    Blocks are read ahead for this rank's part of the current window of each source, and of the
    next one. Positions are read in ascending order, so earlier windows are not needed any more.

    Args:
        register: the method of the training state.

    Raises:
        DataError: a source has no rows.
    """

    may_wait = True

    def __init__(
        self, stream: BlockStream, seed: int, progress: TrainingProgress, register: Register
    ) -> None:
        self._stream = stream
        self.seed = seed
        transforms = tuple(part.transform for part in stream.parts)
        if any(transforms):
            self.maker = partial(transform_row, transforms)
        self._progress = progress
        self._order = stream.order(seed, progress.global_batch)
        self.length = self._order.length
        self._share = (0.0, 1.0)  # this rank's part of a step's samples
        self._split = StepSplit()  # of the steps that are read
        self._windows: dict[int, tuple[int, int]] = {}  # first and last current window, by source
        self.cache = BlockCache(
            [part.source for part in stream.parts],
            stream.cache_bytes,
            stream.threads,
            stream.read_timeout_s,
        )
        weakref.finalize(self, self.cache.close)
        register(STATE_NAME, self._get, self._set)

    def begin(self, cursor: int, split: StepSplit, check: Callable[[], None]) -> None:
        batch = self._progress.global_batch
        self._split = split
        first, last = _own_range(split)
        self._windows = {}
        if batch != self._order.group or cursor % batch != 0:
            first, last = 0, batch  # steps are not groups of the order: this rank's part varies
        self._share = (first / batch, last / batch)
        self._order.choose_part(first, last)
        self._enter_windows(cursor, _split_by_block(self._order.places(cursor, batch)))

    def read(
        self, step: int, part: MicroBatch, *, is_last: bool, check: Callable[[], None]
    ) -> tuple[list[int], Sequence[Any]]:
        places = self._order.places(step + part.start, part.read_count)
        by_block = _split_by_block(places)
        self._enter_windows(step, by_block)
        parts: list[tuple[Key, BlockRows]] = []  # at the end of an epoch, a block may be in two
        for (source, _), indices in by_block.items():
            key = source, int(places.blocks[indices[0]])
            block = self.cache.get(key, check)
            parts.append((key, BlockRows(block, places.rows[indices], indices)))
        numbers = places.numbers.tolist()
        batch = RowBatch([rows for _, rows in parts])
        if self.maker is None:
            return numbers, batch
        return numbers, batch.place(self._take_rows(*key, rows) for key, rows in parts)

    def take_counts(self) -> dict[str, dict[str, int]]:
        """Returns, by source, the number of `samples` of this rank in the step that has ended, and
        the counts of `BlockCache.take_counts`. Called by the training thread after each step."""
        counts: defaultdict[str, dict[str, int]] = defaultdict(dict)
        names = [redact_url(part.name) for part in self._stream.parts]
        for (source, kind), number in self.cache.take_counts().items():
            counts[names[source]][kind] = number
        step = self._progress.sample_cursor - self._progress.global_batch
        first, last = _own_range(self._split)
        if step >= 0 and first < last:
            sources = self._order.places(step + first, last - first).sources
            for source, number in enumerate(np.bincount(sources).tolist()):
                if number:
                    counts[names[source]]["samples"] = number
        return dict(counts)

    def _enter_windows(self, cursor: int, by_block: Iterable[tuple[int, int]]) -> None:
        """Plans the windows of the blocks that are read next, and one more window of each source.
        `by_block` has the (source, turn) of these blocks, ascending.

        A step may have rows of the end of a window and of the next one. So a plan is not replaced
        by one of the window before it. All sources are planned together, so that none takes the
        memory of another.
        """
        turns_by_source: dict[int, list[int]] = {}
        for source, turn in by_block:
            turns_by_source.setdefault(source, []).append(turn)
        plans: dict[int, ReadAhead] = {}
        for source, turns in turns_by_source.items():
            order = self._order.orders[source]
            current = (order.window_of(turns[0]), order.window_of(turns[-1]))
            known = self._windows.get(source, (-1, -1))
            if known < current or current[0] < known[0] - 1:  # the latter: the job has gone back
                self._windows[source] = current
                now = [
                    block
                    for window in range(current[0], current[1] + 1)
                    for block in order.blocks_of_window(window, *self._share)
                ]
                later = order.blocks_of_window(current[1] + 1, *self._share)
                rows = order.window_start(current[1] + 1) - order.window_start(current[0])
                due_step = cursor / self._order.group + rows / order.strata
                plans[source] = ReadAhead(now, later, due_step)
        if plans:
            self.cache.plan(plans)

    def _take_rows(self, source: int, block: int, part: BlockRows) -> list[StreamRow]:
        rows = part.rows.tolist()
        block_source = self._stream.parts[source].source
        with named_errors(
            lambda: f"rows {rows} of {describe_block(block_source, block)} cannot be used",
            fix="correct the data",
        ):
            samples = part.samples()
        return [
            StreamRow(source, block, row, values) for row, values in zip(rows, samples, strict=True)
        ]

    def describe(self, raw: StreamRow) -> str:
        source = self._stream.parts[raw.source].source
        return f"row {raw.row} of {describe_block(source, raw.block)}"

    def _get(self) -> dict[str, Any]:
        return {"batch": self._order.group, **self._stream.identity(self.seed)}

    def _set(self, value: dict[str, Any]) -> None:
        saved, batch = {**value}, value["batch"]
        del saved["batch"]
        check_identity(saved, self._stream.identity(self.seed))
        self._order = self._stream.order(self.seed, batch)
        self._windows = {}


def _own_range(split: StepSplit) -> tuple[int, int]:
    """Returns a rank's range of the samples of a step: the first, and the one after the last."""
    own = [part for part in split if part.count]
    return (own[0].start, own[-1].start + own[-1].count) if own else (0, 0)


def _split_by_block(places: Places) -> dict[tuple[int, int], Integers]:
    """Returns the indices of the rows of each (source, turn), which are ascending: blocks are read
    ahead in this sequence."""
    keys = (places.sources << _TURN_BITS) + places.turns
    by_key = np.argsort(keys, kind="stable")
    keys = keys[by_key]
    begins = [0, *(np.flatnonzero(keys[1:] != keys[:-1]) + 1).tolist()]
    ends = [*begins[1:], len(keys)]
    first = keys[begins].tolist()
    return {
        (key >> _TURN_BITS, key & ((1 << _TURN_BITS) - 1)): by_key[begin:end]
        for key, begin, end in zip(first, begins, ends, strict=True)
    }
