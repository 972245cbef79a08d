"""Readers of iterables as the source of a `StepLoader`.

A rank runs the readers whose rows are in its part of a step, each in a thread that reads ahead. A
reader that moves to another rank begins there at its newest snapshot, and reads on to the row that
is needed. Each rank stores the snapshots that it knows with its part of the training state, and
gets the parts of all ranks whenever a state is loaded or the ranks change. So ranks exchange
nothing during steps.

Threads. The loader's thread calls `begin` and `read`; the training thread calls `_get`, `_set` and
`take_counts`, concurrently. They share `_snapshots`, of which each value is replaced as a whole,
and `_uses`, whose numbers grow; both are copied before they are used. A snapshot is valid,
whichever iteration took it. But between a load and the next `begin`, the thread of an iteration
that is about to end adds none. A reader's thread ends when the reader is dropped: when ranks have
changed, a state is loaded, a row is needed again, or with the source. Nothing waits for that
thread: a row that hangs delays no repair.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty
from time import monotonic
from typing import Any, NamedTuple

from rayzero.engine.data.prefetch import Prefetch
from rayzero.engine.data.sample_source import Register, SampleSource
from rayzero.engine.data.sampling import MicroBatch, StepSplit, TrainingProgress
from rayzero.engine.data.streams.cache import CHECK_INTERVAL_S
from rayzero.engine.data.streams.identity import check_identity
from rayzero.engine.data.streams.readers import IterableStream, ReadRow, Snapshot, read_rows
from rayzero.engine.data.streams.source import StreamRow, Transform, transform_row
from rayzero.engine.errors import DataError

STATE_NAME = "rayzero.iterable"
"""The name of the registered state: snapshots, and the values that the order depends on."""


class _KeptRow(NamedTuple):
    """A row with its number. `made` holds the sample once this process has made it of the row: a
    transform is called only once, because it may change the row."""

    number: int
    row: StreamRow
    made: list[Any]


def _make_once(transform: Transform, kept: _KeptRow) -> Any:
    if not kept.made:
        kept.made.append(transform_row((transform,), kept.row))
    return kept.made[0]


class IterableSource(SampleSource):
    """The rows of a stream's readers, by position.

    A row is kept from its read until it is trained on, so that a new iteration, such as that of
    `loader.steps(1)` in a loop, does not read it again.

    Args:
        register: the method of the training state.

    Raises:
        DataError: no reader has a row.
    """

    may_wait = True

    def __init__(
        self, stream: IterableStream, seed: int, progress: TrainingProgress, register: Register
    ) -> None:
        self._stream = stream
        self.seed = seed
        if stream.transform is not None:
            self.maker = partial(_make_once, stream.transform)
        self._progress = progress
        self._order = stream.order(progress.global_batch)
        self.length = self._order.length
        # The split that the readers are for; None: a state was loaded, and no iteration has begun.
        self._split: StepSplit | None = None
        self._readers: dict[int, _Reader] = {}
        self._kept: dict[int, _KeptRow] = {}  # by position
        self._last: _KeptRow | None = None  # the row that was read last
        self._uses = Counter[str]()  # of rows, counted by the loader's thread
        self._taken_uses = Counter[str]()
        # By reader, in ascending order. A step may be lost after it has ended: the first snapshot
        # is the newest one before the rows of that step.
        self._snapshots: dict[int, tuple[Snapshot, ...]] = {}
        register(STATE_NAME, self._get, self._set)

    def begin(self, cursor: int, split: StepSplit, check: Callable[[], None]) -> None:
        if split is not self._split:
            self._split = split
            self._readers = {}
            self._kept = {}
            self._last = None

    def read(
        self, step: int, part: MicroBatch, *, is_last: bool, check: Callable[[], None]
    ) -> tuple[list[int], list[Any]]:
        if not part.count and self._last is not None:  # its own row may be another rank's
            return self._give([self._last])
        for position in list(self._kept):
            if position < self._progress.sample_cursor:
                del self._kept[position]
        start = step + part.start
        readers, rows = self._order.places(start, part.read_count)
        numbers = self._order.numbers(readers, rows).tolist()
        places = zip(numbers, readers.tolist(), rows.tolist(), strict=True)
        read = []
        for position, (number, reader, row) in enumerate(places, start):
            if position not in self._kept:
                check()  # after a close, the next iteration uses the readers
                values = self._read_row(reader, row, check)
                self._kept[position] = _KeptRow(number, StreamRow(0, reader, row, values), [])
            read.append(self._kept[position])
        self._last = read[-1]
        return self._give(read)

    def _give(self, read: list[_KeptRow]) -> tuple[list[int], list[Any]]:
        raws = read if self.maker is not None else [kept.row.values for kept in read]
        return [kept.number for kept in read], raws

    def take_counts(self) -> dict[str, dict[str, int]]:
        """Returns, as `StreamSource.take_counts`, the number of `samples` of this rank in the step
        that has ended, and how often a row was read already when it was needed (`hits`), or was not
        (`waits`)."""
        now = self._uses.copy()
        counts = now - self._taken_uses
        self._taken_uses = now
        samples = sum(part.count for part in self._split or ())
        return {self._stream.name: {**counts, "samples": samples}}

    def describe(self, raw: _KeptRow) -> str:
        return f"row {raw.row.row} of reader {raw.row.block}"

    def _read_row(self, number: int, row: int, check: Callable[[], None]) -> Any:
        reader = self._readers.get(number)
        if reader is None or reader.next_row > row:
            known = [Snapshot(), *self._snapshots.get(number, ())]
            start = [snapshot for snapshot in known if snapshot.row <= row][-1]
            reader = self._readers[number] = _Reader(self._stream, number, start)
        waits = False
        while True:
            try:
                read, waited = reader.read(check)
            except BaseException:
                if reader.has_failed:
                    del self._readers[number]
                raise
            waits = waits or waited
            if read.snapshot is not None:
                self._add_snapshot(number, read.snapshot)
            if read.row == row:
                self._uses["waits" if waits else "hits"] += 1
                return read.value

    def _add_snapshot(self, number: int, snapshot: Snapshot) -> None:
        # `_set` writes these two in the other order. So the thread of an iteration that is about to
        # end never adds to the snapshots of a loaded state: those are older, and would be dropped.
        snapshots = self._snapshots
        if self._split is None:
            return
        oldest = max(0, self._progress.sample_cursor - self._progress.global_batch)
        needed_row = self._order.rows_before(oldest)[number]
        by_row = {known.row: known for known in (*snapshots.get(number, ()), snapshot)}
        rows = sorted(by_row)
        first = max(0, bisect_right(rows, needed_row) - 1)
        snapshots[number] = tuple(by_row[row] for row in rows[first:])

    def _get(self) -> dict[str, Any]:
        before = self._order.rows_before(self._progress.sample_cursor)
        snapshots = {}
        for number, known in self._snapshots.copy().items():
            passed = [snapshot for snapshot in known if snapshot.row <= before[number]]
            if passed:
                snapshots[number] = [*passed[-1]]
        identity = self._stream.identity()
        return {"batch": self._order.group, "identity": identity, "snapshots": snapshots}

    def _set(self, parts: Sequence[dict[str, Any]]) -> None:
        check_identity(parts[0]["identity"], self._stream.identity())
        newest: dict[int, Snapshot] = {}
        for part in parts:
            for number, fields in part["snapshots"].items():
                known = newest.get(number, Snapshot())
                newest[number] = max(known, Snapshot(*fields), key=lambda snapshot: snapshot.row)
        self._split = None
        self._snapshots = {number: (snapshot,) for number, snapshot in newest.items()}
        self._order = self._stream.order(parts[0]["batch"])


class _Reader:
    """A reader whose thread is up to `read_ahead` rows ahead.

    Attributes:
        next_row: the row that the next `read` returns.
        has_failed: whether a row could not be read, so that there are no more.
    """

    def __init__(self, stream: IterableStream, number: int, start: Snapshot) -> None:
        self.next_row = start.row
        self.has_failed = False
        self._number = number
        self._timeout_s = stream.read_timeout_s
        self._feed = Prefetch(read_rows(stream, number, start), stream.read_ahead)

    def read(self, check: Callable[[], None]) -> tuple[ReadRow, bool]:
        """Returns the next row, and whether the caller had to wait for it. Calls `check` at least
        every `CHECK_INTERVAL_S` while waiting. Raises what `read_rows` and `check` raise; DataError
        if the row takes too long."""
        since_s, interval_s = monotonic(), 0.0
        while True:
            try:
                read = self._feed.next_within(interval_s)
            except Empty:
                check()
            except BaseException:
                self.has_failed = True
                raise
            else:
                self.next_row = read.row + 1
                return read, interval_s > 0
            interval_s = CHECK_INTERVAL_S
            if monotonic() - since_s > self._timeout_s:
                self.has_failed = True
                raise DataError(
                    f"row {self.next_row} of reader {self._number} was not read within "
                    f"{self._timeout_s:g} s",
                    fix="set read_timeout_s of iterable(), or look at what it reads from",
                )
