"""Readers of iterables as the source of a `StepLoader`.

A rank runs the readers whose rows are in its part of a step, each in a thread that reads ahead. A
reader that comes to another rank begins there at its newest snapshot, and reads on to its row. How
that rank knows the snapshot: each rank stores what it knows with its part of the training state,
and every rank gets the parts of all, whenever a state is loaded or the ranks change. So ranks
exchange nothing during steps.

Threads. `begin` and `read` are called by the loader's thread; `_get`, `_set` and `take_counts` by
the training thread, concurrently. They share `_snapshots`, of which each value is replaced as a
whole, and `_uses`, whose numbers grow; both are copied before they are used. A snapshot is true
whoever took it; between a load and the next `begin`, a thread that is about to end adds none. A
reader's thread ends when the reader is dropped: where ranks have changed, a state is loaded, a row
is needed again, or with the source. It is not waited for: a row that hangs delays no repair.
"""

from __future__ import annotations

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
"""The registered state with the snapshots, and what the order of the samples depends on."""


class _KeptRow(NamedTuple):
    """A row and its number; and the sample that this process has made of it: once, because a
    transform may change the row."""

    number: int
    row: StreamRow
    made: list[Any]


def _make_once(transform: Transform, kept: _KeptRow) -> Any:
    if not kept.made:
        kept.made.append(transform_row((transform,), kept.row))
    return kept.made[0]


class IterableSource(SampleSource):
    """The rows of a stream's readers, by position.

    Rows that were read and not trained on are kept until that is done: an iteration that begins
    anew, as `loader.steps(1)` in a loop does, finds them.

    Args:
        register: the training state's.

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
        self._split: StepSplit | None = None  # that the readers are for
        self._readers: dict[int, _Reader] = {}
        self._kept: dict[int, _KeptRow] = {}  # by position
        self._last: _KeptRow | None = None
        self._uses = Counter[str]()  # of rows, counted by the loader's thread
        self._taken_uses = Counter[str]()
        # By reader, in ascending order: from the last one before the step that may be lost on.
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
        if not part.count and self._last is not None:  # or a filler runs another rank's reader
            return self._give([self._last])
        for position in [it for it in self._kept if it < self._progress.sample_cursor]:
            del self._kept[position]
        start = step + part.start
        readers, rows = self._order.places(start, part.read_count)
        numbers = self._order.numbers(readers, rows).tolist()
        places = zip(numbers, readers.tolist(), rows.tolist(), strict=True)
        read = []
        for position, (number, reader, row) in enumerate(places, start):
            if position not in self._kept:
                check()  # the readers are the next iteration's, however long the last row took
                values = self._read_row(reader, row, check)
                self._kept[position] = _KeptRow(number, StreamRow(0, reader, row, values), [])
            read.append(self._kept[position])
        self._last = read[-1]
        return self._give(read)

    def _give(self, read: list[_KeptRow]) -> tuple[list[int], list[Any]]:
        raws = read if self.maker is not None else [it.row.values for it in read]
        return [it.number for it in read], raws

    def take_counts(self) -> dict[str, dict[str, int]]:
        """Returns the `samples` of this rank in the step that has ended, and how often one of its
        rows was there when it was needed, `hits`, or not, `waits`: see `StreamSource`."""
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
            known = [it for it in self._snapshots.get(number, ()) if it.row <= row]
            at = known[-1] if known else Snapshot()
            reader = self._readers[number] = _Reader(self._stream, number, at)
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
        # Read in this sequence, against that of `_set`: snapshots of a loaded state are older than
        # those that an iteration still adds which is about to end, and would be dropped by them.
        snapshots = self._snapshots
        if self._split is None:
            return
        oldest = max(0, self._progress.sample_cursor - self._progress.global_batch)
        needed_row = self._order.rows_before(oldest)[number]
        known = {it.row: it for it in (*snapshots.get(number, ()), snapshot)}
        rows = sorted(known)
        first = max([0, *(place for place, row in enumerate(rows) if row <= needed_row)])
        snapshots[number] = tuple(known[row] for row in rows[first:])

    def _get(self) -> dict[str, Any]:
        before = self._order.rows_before(self._progress.sample_cursor)
        snapshots = {}
        for number, known in self._snapshots.copy().items():
            if passed := [it for it in known if it.row <= before[number]]:
                snapshots[number] = [*passed[-1]]
        identity = self._stream.identity()
        return {"batch": self._order.group, "identity": identity, "snapshots": snapshots}

    def _set(self, parts: Sequence[dict[str, Any]]) -> None:
        check_identity(parts[0]["identity"], self._stream.identity())
        newest: dict[int, Snapshot] = {}
        for part in parts:
            for number, fields in part["snapshots"].items():
                known = newest.get(number, Snapshot())
                newest[number] = max(known, Snapshot(*fields), key=lambda it: it.row)
        self._split = None
        self._snapshots = {number: (snapshot,) for number, snapshot in newest.items()}
        self._order = self._stream.order(parts[0]["batch"])


class _Reader:
    """A reader whose thread is up to `read_ahead` rows ahead.

    Attributes:
        next_row: the one that `read` returns.
        has_failed: there are no more rows.
    """

    def __init__(self, stream: IterableStream, number: int, at: Snapshot) -> None:
        self.next_row = at.row
        self.has_failed = False
        self._number = number
        self._timeout_s = stream.read_timeout_s
        self._feed = Prefetch(read_rows(stream, number, at), stream.read_ahead)

    def read(self, check: Callable[[], None]) -> tuple[ReadRow, bool]:
        """The next row, and whether it was waited for. Raises what `read_rows` raises; DataError if
        it takes too long; what `check` raises, which is called at least every `CHECK_INTERVAL_S`
        while waiting."""
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
