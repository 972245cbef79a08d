"""Streams as training data: what a script describes, and the source of a `StepLoader`."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from rayzero.engine.data.sample_source import SampleSource
from rayzero.engine.data.sampling import MicroBatch, StepSplit, TrainingProgress
from rayzero.engine.data.streams.block import BlockSource
from rayzero.engine.data.streams.cache import BlockCache
from rayzero.engine.data.streams.identity import check_identity
from rayzero.engine.data.streams.mixture import MixSchedule
from rayzero.engine.data.streams.order import BlockOrder, StreamOrder
from rayzero.engine.errors import ConfigError, DataError
from rayzero.engine.redact import redact_url

STATE_NAME = "rayzero.stream"
"""The registered state with what the order of the samples depends on."""

Transform = Callable[[dict[str, Any]], Any]
Register = Callable[[str, Callable[[], Any], Callable[[Any], object]], None]
"""`TrainingState.register`."""


@dataclass(frozen=True)
class StreamPart:
    """One source of a stream. `name`: in its mixture, for metrics."""

    source: BlockSource
    window: int
    transform: Transform | None
    name: str


@dataclass(frozen=True)
class Mixture:
    """How the parts of a stream are mixed: see `mix`."""

    weights: Mapping[int, tuple[float, ...]]  # by the step from which on they hold
    max_epochs: tuple[float | None, ...]


@dataclass(frozen=True)
class BlockStream:
    """Training data in blocks: what `stream` and `mix` return, to be given as `training_data`."""

    parts: tuple[StreamPart, ...]
    cache_bytes: int
    threads: int
    read_timeout_s: float
    mixture: Mixture | None = field(default=None)

    def __post_init__(self) -> None:
        windows = [(f"shuffle_window of {it.source.name!r}", it.window) for it in self.parts]
        sizes = [("cache_bytes", self.cache_bytes), ("threads", self.threads)]
        for name, value in [*windows, *sizes, ("read_timeout_s", self.read_timeout_s)]:
            if value <= 0:
                raise ConfigError(
                    f"{name} is {value}", "more than 0", "set it in stream() or mix()"
                )

    def order(self, seed: int, batch: int) -> StreamOrder:
        """The order of the samples in a job of this seed that began with this `train_batch_size`;
        for `check_ledger`, too. Raises DataError if a source has no rows."""
        orders = [
            BlockOrder(part.source.counts, seed + number, part.window)
            for number, part in enumerate(self.parts)
        ]
        if self.mixture is None:
            return StreamOrder(orders, None, batch)
        lengths = [order.length for order in orders]
        limits = [
            None if epochs is None else max(1, int(epochs * length))
            for epochs, length in zip(self.mixture.max_epochs, lengths, strict=True)
        ]
        weights = {step * batch: weights for step, weights in self.mixture.weights.items()}
        return StreamOrder(orders, MixSchedule(lengths, weights, limits), batch)

    def identity(self, seed: int) -> dict[str, Any]:
        """Returns what the order depends on, by the words of an error."""
        identity: dict[str, Any] = {"seed": str(seed)}
        for part in self.parts:
            counts, name = part.source.counts, part.source.name
            identity[f"blocks and rows of {name!r}"] = f"{len(counts)} and {int(counts.sum())}"
            identity[f"shuffle_window of {name!r}"] = str(part.window)
            identity[f"fingerprint of the data of {name!r}"] = part.source.fingerprint
        if self.mixture is not None:
            identity["weights by step"] = str(dict(sorted(self.mixture.weights.items())))
            identity["max_epochs"] = str(self.mixture.max_epochs)
        return identity


class StreamRow(NamedTuple):
    """One row of a block, which a sample is made of."""

    source: int
    block: int
    row: int
    values: dict[str, Any]


def transform_row(transforms: Sequence[Transform | None], row: StreamRow) -> Any:
    transform = transforms[row.source]
    return row.values if transform is None else transform(row.values)


class StreamSource(SampleSource):
    """A stream as the source of a `StepLoader`. What its order depends on is registered with the
    training state, and compared when that is loaded.

    Blocks are read ahead for this rank's part of the current window of each source, and of the
    next one. Positions are read in ascending order, so those of former windows are done with.

    Args:
        register: the training state's.

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
        self._share = (0.0, 1.0)  # of a step's samples, which are this rank's
        self._split = StepSplit()  # of the steps that are read
        self._windows: dict[int, int] = {}  # the current one, by source
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
        self._share = (0.0, 1.0)
        if batch == self._order.group and cursor % batch == 0:
            self._share = (first / batch, last / batch)
        places = self._order.places(cursor, batch)
        sources, firsts = np.unique(places.sources, return_index=True)
        turns = zip(sources.tolist(), places.turns[firsts].tolist(), strict=True)
        self._enter_windows(dict(turns))  # together: none takes the memory of another one's

    def read(
        self, step: int, part: MicroBatch, *, is_last: bool, check: Callable[[], None]
    ) -> tuple[list[int], list[Any]]:
        places = self._order.places(step + part.start, part.read_count)
        samples: list[Any] = [None] * part.read_count
        keys = list(zip(places.sources.tolist(), places.turns.tolist(), strict=True))
        for key in sorted(set(keys)):
            source, turn = key
            self._enter_windows({source: turn})
            wanted = [it for it, other in enumerate(keys) if other == key]
            block = int(places.blocks[wanted[0]])
            table = self.cache.get((source, block), check)
            rows = [int(places.rows[it]) for it in wanted]
            read = self._take_rows(source, block, table, rows)
            for it, row in zip(wanted, read, strict=True):
                samples[it] = row.values if self.maker is None else row
        return self._order.numbers(places).tolist(), samples

    def take_counts(self) -> dict[str, dict[str, int]]:
        """Returns, by source, the `samples` of the step that this rank has just finished, and what
        `BlockCache.take_counts` has counted since the step before. For the training thread."""
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

    def _enter_windows(self, turns: Mapping[int, int]) -> None:
        """The next rows of these sources are of blocks with these turns."""
        plans: dict[int, list[int]] = {}
        for source, turn in turns.items():
            order = self._order.orders[source]
            window = order.window_of(turn)
            if self._windows.get(source) != window:
                self._windows[source] = window
                blocks = [order.blocks_of_window(it, *self._share) for it in (window, window + 1)]
                plans[source] = [*blocks[0], *blocks[1]]
        if plans:
            self.cache.plan(plans)

    def _take_rows(
        self, source: int, block: int, table: pa.Table, rows: Sequence[int]
    ) -> list[StreamRow]:
        try:
            taken = table.take(pa.array(rows, pa.int64()))
            columns = {name: column_values(taken[name]) for name in taken.column_names}
        except Exception as error:
            part = self._stream.parts[source]
            raise DataError(
                f"rows {list(rows)} of block {block} of {part.source.name!r} "
                f"({part.source.describe(block)}) cannot be used: {type(error).__name__}: {error}",
                fix="correct the data",
            ) from error
        return [
            StreamRow(source, block, row, {name: it[number] for name, it in columns.items()})
            for number, row in enumerate(rows)
        ]

    def describe(self, raw: StreamRow) -> str:
        part = self._stream.parts[raw.source]
        place = part.source.describe(raw.block)
        return f"row {raw.row} of block {raw.block} of {part.source.name!r} ({place})"

    def _get(self) -> dict[str, Any]:
        return {"batch": self._order.group, **self._stream.identity(self.seed)}

    def _set(self, value: dict[str, Any]) -> None:
        saved, batch = {**value}, value["batch"]
        del saved["batch"]
        check_identity(saved, self._stream.identity(self.seed))
        self._order = self._stream.order(self.seed, batch)
        self._windows = {}


def _own_range(split: StepSplit) -> tuple[int, int]:
    """The samples of a step that are a rank's: the first, and the one after the last."""
    own = [part for part in split if part.count]
    return (own[0].start, own[-1].start + own[-1].count) if own else (0, 0)


def column_values(column: pa.ChunkedArray) -> list[Any]:
    """Python values of a column; numpy arrays of lists of numbers, and of tensors."""
    kind = column.type
    if isinstance(kind, pa.FixedShapeTensorType):
        return list(np.array(column.combine_chunks().to_numpy_ndarray()))
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if is_list or pa.types.is_fixed_size_list(kind):
        item = kind.value_type
        if pa.types.is_integer(item) or pa.types.is_floating(item):
            return [_number_list(scalar) for scalar in column]
    return column.to_pylist()  # type: ignore[no-any-return]


def _number_list(scalar: Any) -> Any:
    values = scalar.values
    if values is None or values.null_count:
        return scalar.as_py()
    return np.array(values.to_numpy(zero_copy_only=False))
