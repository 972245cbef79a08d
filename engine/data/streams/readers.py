"""Iterables as training data: each of a fixed number of readers yields its rows in order.

A reader is the iterable that `make(reader, readers)` returns. It is made again for each of its
epochs, and when it continues at a snapshot. So a row depends on the reader and the row's number,
not on the rank that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

from rayzero.engine.data.streams.reader_order import ReaderOrder
from rayzero.engine.errors import ConfigError, DataError, check_positive, is_number, named_errors

Make = Callable[[int, int], Iterable[Any]]

_END = object()
_UNREAD = object()
_BUFFERS = ("BufferShuffledExamplesIterable",)
"""Steps of `datasets` whose `state_dict` leaves out the rows that they hold."""
INSTEAD_OF_ITERABLE = (
    "rayzero.data.stream(source), of from_hf(dataset) or blocks(its files); an iterable is for "
    "training_data= of ctx.initialize, rayzero.initialize and deepspeed.initialize"
)
"""The way out for an `IterableStream` that was given to a DataLoader, Trainer or Accelerate."""
_WAYS_OUT = (
    "rayzero.data.blocks(its files), which shuffles; or iterable(..., replay=True), which reads "
    "from the beginning of the epoch after each fault"
)


class Snapshot(NamedTuple):
    """A place where a reader can begin: before its row `row`, counted over all epochs.

    Attributes:
        epoch: the epoch of the reader, from 0.
        first: the first row of that epoch.
        state: the iterable's `state_dict()`; None: `row` is the first row of the epoch.
    """

    row: int = 0
    epoch: int = 0
    first: int = 0
    state: Any = None


class ReadRow(NamedTuple):
    """A row, and a snapshot that was taken after it, or before the first row of an epoch."""

    row: int
    value: Any
    snapshot: Snapshot | None


@dataclass(frozen=True)
class IterableStream:
    """Training data of iterables: what `iterable` returns, to be given as `training_data`."""

    make: Make
    readers: int
    rows: tuple[int, ...] | None
    snapshot_every: int
    transform: Callable[[Any], Any] | None
    replay: bool
    read_ahead: int
    read_timeout_s: float
    name: str  # in metrics

    def __post_init__(self) -> None:
        check_positive("iterable()", readers=self.readers, snapshot_every=self.snapshot_every)
        check_positive("iterable()", read_ahead=self.read_ahead)
        check_positive("iterable()", whole=False, read_timeout_s=self.read_timeout_s)
        rows = self.rows or (0,) * self.readers
        are_numbers = all(is_number(count, whole=True) and count >= 0 for count in rows)
        if len(rows) != self.readers or not are_numbers:
            seen = f"rows of iterable() is {list(rows)}, with {self.readers} readers"
            raise ConfigError(seen, "a number of rows of each reader, 0 or more", "rows")

    def __len__(self) -> int:
        """Raises ConfigError: a DataLoader asks for it."""
        raise ConfigError(
            "rayzero.data.iterable(...) was given to a DataLoader or a sampler",
            "a dataset whose samples are read by their positions",
            f"give it {INSTEAD_OF_ITERABLE}",
        )

    def order(self, batch: int) -> ReaderOrder:
        """Returns the order of the samples in a job that began with this `train_batch_size`.
        `check_ledger` takes it, too. Raises DataError if there are no rows."""
        return ReaderOrder(self.readers, self.rows, batch)

    def identity(self) -> dict[str, Any]:
        """Returns the values that the order depends on, by the names that errors use."""
        return {"readers": str(self.readers), "rows of its readers": str(self.rows)}

    def open(self, reader: int, start: Snapshot) -> Any:
        """Makes a reader that begins at a snapshot. Raises ConfigError if it has no exact state."""
        made: Any = self.make(reader, self.readers)
        # The nodes of torchdata have `reset`.
        loads = [name for name in ("load_state_dict", "reset") if hasattr(made, name)]
        seen = ""
        if not (loads and hasattr(made, "state_dict")):
            seen = "no state_dict() and load_state_dict(): where it is cannot be saved"
        elif any(step in _BUFFERS for step in hf_steps(made)):
            seen = "shuffle(buffer_size), whose rows are not in its state_dict()"
        if seen and not self.replay:
            raise ConfigError(
                f"reader {reader}, a {type(made).__name__}, has {seen}",
                "an iterable that continues exactly behind the last row",
                _WAYS_OUT if loads else f"give it both methods; or {_WAYS_OUT}",
            )
        if hasattr(made, "set_epoch"):
            made.set_epoch(start.epoch)
        if start.state is not None:
            getattr(made, loads[0])(deepcopy(start.state))
        return made


def read_rows(stream: IterableStream, reader: int, start: Snapshot) -> Iterator[ReadRow]:
    """Yields the rows of a reader from a snapshot on, epoch after epoch. Raises DataError that
    names reader and row; ConfigError as `open`.

    Snapshots are taken after the rows `snapshot_every - 1`, `2 * snapshot_every - 1` and so on, so
    after the same rows wherever the reader began; and at the end of an epoch. Order: the state is
    read after that row. Then the next row is read, to see whether the epoch has ended: iterables
    differ in what they make of a state of their end.
    """
    row = start.row
    snapshot: Snapshot | None = None
    limit = None if stream.rows is None else stream.rows[reader]
    while True:
        with _named(reader, row):
            made = stream.open(reader, start)
            values = iter(made)
            value = next(values, _END)
        while value is not _END:
            next_value: Any = _UNREAD
            next_row = row + 1
            is_last = limit is not None and next_row == start.first + limit
            is_due = next_row % stream.snapshot_every == 0 and not stream.replay
            if is_due or is_last:
                with _named(reader, next_row):
                    state = deepcopy(made.state_dict()) if is_due else None
                    next_value = next(values, _END)
                if next_value is _END:
                    snapshot = Snapshot(next_row, start.epoch + 1, next_row)
                elif is_last:
                    raise _count_error(reader, start.epoch, f"more than {limit}", limit)
                else:
                    snapshot = Snapshot(next_row, start.epoch, start.first, state)
            yield ReadRow(row, value, snapshot)
            row = next_row
            snapshot = None
            with _named(reader, row):
                value = next(values, _END) if next_value is _UNREAD else next_value
        if row - start.first != limit and (limit is not None or row == start.first):
            raise _count_error(reader, start.epoch, row - start.first, limit)
        start = snapshot = Snapshot(row, start.epoch + 1, row)


def hf_steps(dataset: Any) -> Iterator[str]:
    """Yields the type names of the steps of which an `IterableDataset` of `datasets` consists."""
    pending = [getattr(dataset, "_ex_iterable", None)]
    while pending:
        if (step := pending.pop()) is not None:
            yield type(step).__name__
            pending += [getattr(step, "ex_iterable", None), *getattr(step, "ex_iterables", ())]


def _named(reader: int, row: int) -> AbstractContextManager[None]:
    fix = "correct the iterable, or the data behind it"
    return named_errors(lambda: f"row {row} of reader {reader} cannot be read", fix=fix)


def _count_error(reader: int, epoch: int, seen: int | str, limit: int | None) -> DataError:
    allowed = "one row or more" if limit is None else f"{limit}, by rows="
    return DataError(
        f"reader {reader} has {seen} rows in its epoch {epoch}",
        f"{allowed}, in each epoch",
        "give iterable(rows=) the number of each reader's rows; or leave it out: each reader then "
        "begins again where it ends",
    )
