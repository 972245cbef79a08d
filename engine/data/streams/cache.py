"""Reads blocks ahead in threads, and keeps them in memory of a bounded size."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from time import monotonic

import pyarrow as pa

from rayzero.engine.data.streams.block import BlockSource, describe_block
from rayzero.engine.data.streams.rows import BlockInMemory
from rayzero.engine.errors import DataError, named_errors

log = logging.getLogger("rayzero.engine")

Key = tuple[int, int]  # (source, block)

CHECK_INTERVAL_S = 0.2
"""How often a reader that waits for a block checks whether it is to stop."""

READ_FACTOR = 4
"""How many times a block is in memory while it is read: bytes of the file, pages, columns."""
KEPT_BYTES = 128 << 20
"""The most freed memory that Arrow's usual pool, mimalloc, keeps for a thread that reads one block
after another. Measured: 24 to 113 MiB, with blocks of 8 and 66 MiB."""
_KEPT_SHARE = 1 / 4
_POOL_VARIABLE = "ARROW_DEFAULT_MEMORY_POOL"


@dataclass
class CacheCounters:
    """Counts what a cache has done. `untaken` is what `take_counts` returns next."""

    reads: int = 0
    held_bytes: int = 0
    peak_bytes: int = 0
    warned: bool = False  # that a block is read again
    untaken: Counter[tuple[int, str]] = field(default_factory=Counter)


@dataclass(frozen=True)
class ReadAhead:
    """The blocks that a source needs now, and those that it needs from a step on."""

    now: Sequence[int]
    later: Sequence[int]
    due_step: float


class BlockCache:
    """The blocks of some sources, by (index of the source, block).

    At most `threads` threads read blocks; one more reads a block that a reader waits for. Such
    blocks are read first, then planned ones, as long as they fit. A thread ends when there is
    nothing to read, as after `close`. A block stays in memory until another one needs its room:
    blocks that are not in use are dropped first, the least recently used of them first.

    Args:
        limit_bytes: the most memory for all blocks. It includes blocks that are being read, by
            estimate, and the memory that reading takes.
        threads: the most threads. Reads of a store wait for its answers. Reads of local files only
            use a core, so sources that have `is_local` get no more threads than cores.
        timeout_s: how long one block may take.
    """

    def __init__(
        self, sources: Sequence[BlockSource], limit_bytes: int, threads: int, timeout_s: float
    ) -> None:
        self.counters = CacheCounters()
        self._sources = sources
        self._limit_bytes = limit_bytes
        if all(getattr(source, "is_local", False) for source in sources):
            threads = min(threads, _count_cores())
        kept_bytes = threads * KEPT_BYTES if _keep_freed(limit_bytes, threads) else 0
        self._room_bytes = limit_bytes - kept_bytes  # Arrow's pool keeps the rest
        self._threads = threads
        self._timeout_s = timeout_s
        # The lock of all attributes below.
        self._changed = threading.Condition()
        self._blocks: OrderedDict[Key, BlockInMemory] = OrderedDict()  # least recently used first
        self._errors: dict[Key, Exception] = {}
        self._reading: dict[Key, int] = {}  # blocks that are being read, with the estimated bytes
        self._wanted: list[Key] = []  # blocks that a reader waits for, and nobody reads yet
        # By source: the blocks in use, and how often each was read since it came into use.
        self._plans: dict[int, dict[Key, int]] = {}
        self._ahead: dict[int, ReadAhead] = {}
        self._row_bytes: dict[int, float] = {}  # by source: the most of a block that was read

    def plan(self, plans: Mapping[int, ReadAhead]) -> None:
        """Sets the blocks in use of each source, from now on. First, blocks that are needed now are
        read, of the sources in turn; then later ones, of the source with the first `due_step`."""
        with self._changed:
            for source, ahead in plans.items():
                former = self._plans.get(source, {})
                keys = [(source, block) for block in (*ahead.now, *ahead.later)]
                self._plans[source] = {key: former.get(key, 0) for key in keys}
                self._ahead[source] = ahead
                for key in list(self._errors):
                    if key[0] == source and key not in keys:
                        del self._errors[key]
            self._start_readers()

    def get(self, key: Key, check: Callable[[], None]) -> BlockInMemory:
        """Returns a block, which is in use from now on.

        Args:
            check: is called at least every `CHECK_INTERVAL_S` while waiting, and raises if waiting
                is to end.

        Raises:
            DataError: the block could not be read, is larger than the limit, or took too long.
        """
        since_s = monotonic()
        with self._changed:
            self._plans.setdefault(key[0], {}).setdefault(key, 0)
            self.counters.untaken[key[0], "hits" if key in self._blocks else "waits"] += 1
            while key not in self._blocks:
                if error := self._errors.pop(key, None):
                    raise error
                if key not in self._reading and key not in self._wanted:
                    self._wanted.append(key)
                    self._start_readers()
                self._changed.wait(CHECK_INTERVAL_S)
                self._check(key, since_s, check)
            self._blocks.move_to_end(key)
            return self._blocks[key]

    def take_counts(self) -> Counter[tuple[int, str]]:
        """Returns counts since the last call, by (source, name): the `blocks` that were read, their
        `bytes` in memory, and how often a batch took rows of a block that was in memory (`hits`),
        or was not (`waits`)."""
        with self._changed:
            taken, self.counters.untaken = self.counters.untaken, Counter()
        return taken

    def close(self) -> None:
        """Drops the blocks. A block that is being read is dropped when its read ends."""
        with self._changed:
            self._plans, self._wanted, self._ahead = {}, [], {}
            self._blocks.clear()
            self.counters.held_bytes = 0

    def _check(self, key: Key, since_s: float, check: Callable[[], None]) -> None:
        """Raises if waiting for a block is to end, or has taken too long. Needs the lock."""
        try:
            check()
            if monotonic() - since_s > self._timeout_s:
                raise DataError(
                    f"{self._describe(key)} was not read within {self._timeout_s:g} s",
                    fix="set read_timeout_s of stream(), or look at the storage",
                )
        except BaseException:
            if key in self._wanted:
                self._wanted.remove(key)
            raise

    def _start_readers(self) -> None:
        """Starts a thread for each block that may be read now. Needs the lock."""
        while len(self._reading) < self._threads or self._wanted:
            if (key := self._next()) is None:
                return
            threading.Thread(
                target=self._read_blocks, args=(key,), name="rayzero-blocks", daemon=True
            ).start()

    def _next(self) -> Key | None:
        """Chooses the block to read next, and reserves its memory; None if there is none, or no
        room for it. Needs the lock."""
        key = self._wanted[0] if self._wanted else self._next_planned()
        if key is None:
            return None
        # Other reads free memory when they end: until then no block in use is dropped.
        must_read = bool(self._wanted) and not self._reading
        if not self._make_room(self._estimate(key), in_use_too=must_read) and not must_read:
            return None
        if self._wanted:
            self._wanted.pop(0)
        self._reading[key] = self._estimate(key)
        return key

    def _next_planned(self) -> Key | None:
        """Returns the first planned block that was not read, and can be read now."""
        known = {*self._blocks, *self._reading, *self._errors}
        key = next((key for key in self._sequence() if key not in known), None)
        if key is None or key[0] in self._row_bytes:
            return key
        # The sizes of a source's blocks are estimated by the first that was read. While that is
        # being read, no block after it in the sequence is: it might take the room of others.
        return None if any(key[0] == source for source, _ in self._reading) else key

    def _sequence(self) -> Iterator[Key]:
        """Yields the planned blocks in the sequence in which they are read."""
        now = ([(source, block) for block in ahead.now] for source, ahead in self._ahead.items())
        for keys in zip_longest(*now):
            yield from (key for key in keys if key is not None)
        for source, ahead in sorted(self._ahead.items(), key=lambda item: item[1].due_step):
            yield from ((source, block) for block in ahead.later)

    def _make_room(self, nbytes: int, *, in_use_too: bool) -> bool:
        """Drops blocks until there is room, and returns whether there is. Needs the lock."""
        room = self._room_bytes - sum(self._reading.values()) - nbytes
        used = [key for key in self._blocks if key in self._plans.get(key[0], {})]
        unused = [key for key in self._blocks if key not in used]
        for key in unused + used if in_use_too else unused:
            if self.counters.held_bytes <= room:
                break
            self.counters.held_bytes -= self._blocks.pop(key).nbytes
        return self.counters.held_bytes <= room

    def _estimate(self, key: Key) -> int:
        source, block = key
        nbytes = self._row_bytes.get(source, 0) * self._sources[source].counts[block]
        return int(READ_FACTOR * nbytes)

    def _read_blocks(self, key: Key | None) -> None:
        """Body of a thread: reads a block. If Arrow's pool keeps the memory that this freed, reads
        further blocks into it, as long as there are some that fit."""
        keeps_freed = self._room_bytes < self._limit_bytes
        while key is not None:
            block, error = None, None
            try:
                block = self._read_checked(key)
            except Exception as raised:  # noqa: BLE001 -- raised where the block is used
                error = raised
            if not keeps_freed:
                pa.default_memory_pool().release_unused()
            with self._changed:
                self._take_in(key, block, error)
                del block
                continues = keeps_freed and len(self._reading) < self._threads
                key = self._next() if continues else None
                self._start_readers()
                self._changed.notify_all()
        pa.default_memory_pool().release_unused()

    def _take_in(self, key: Key, block: BlockInMemory | None, error: Exception | None) -> None:
        """Keeps a block that was read, or its error, if the block is in use. Needs the lock."""
        del self._reading[key]
        plan = self._plans.get(key[0], {})
        if key not in plan:
            return
        if error is not None:
            self._errors[key] = error
        if block is None:
            return
        self._make_room(block.nbytes, in_use_too=False)
        self._blocks[key] = block
        self.counters.held_bytes += block.nbytes
        self.counters.peak_bytes = max(self.counters.peak_bytes, self.counters.held_bytes)
        plan[key] += 1
        if plan[key] > 1 and not self.counters.warned:
            self.counters.warned = True
            log.warning(
                "%s is read again, because the blocks in use do not fit in cache_bytes, %.0f MiB"
                "\n  fix: set a larger cache_bytes, or a smaller shuffle_window, of stream()",
                self._describe(key),
                self._limit_bytes / 2**20,
            )

    def _read_checked(self, key: Key) -> BlockInMemory:
        source, block = key
        fix = "correct the source, or the data behind it"
        with named_errors(lambda: f"{self._describe(key)} could not be read", fix=fix):
            read = BlockInMemory(self._sources[source].read(block))
        rows = int(self._sources[source].counts[block])
        if read.table.num_rows != rows:
            raise DataError(
                f"{self._describe(key)} has {read.table.num_rows} rows, and had {rows} when the "
                "stream was made",
                "data of the same rows each time",
                "keep files and datasets as they are, and make the stream again if they changed",
            )
        nbytes = read.nbytes
        if nbytes > self._limit_bytes:
            raise DataError(
                f"{self._describe(key)} takes {nbytes / 2**20:.0f} MiB of memory",
                f"cache_bytes, {self._limit_bytes / 2**20:.0f} MiB",
                "set cache_bytes of stream() to several blocks, or write smaller ones",
            )
        with self._changed:
            self.counters.reads += 1
            self.counters.untaken[source, "blocks"] += 1
            self.counters.untaken[source, "bytes"] += nbytes
            self._row_bytes[source] = max(self._row_bytes.get(source, 0), nbytes / rows)
        return read

    def _describe(self, key: Key) -> str:
        source, block = key
        return describe_block(self._sources[source], block)


def _keep_freed(limit_bytes: int, threads: int) -> bool:
    """Returns whether Arrow's pool keeps the memory that reading a block freed, for the next one:
    new pages from the system cost a third of a read. If it would keep more than a quarter of the
    limit, makes Arrow allocate by jemalloc from now on, which returns freed memory."""
    if threads * KEPT_BYTES <= _KEPT_SHARE * limit_bytes:
        return True
    if _POOL_VARIABLE not in os.environ and "jemalloc" in pa.supported_memory_backends():
        # Returned at once: otherwise memory freed in one read would count in the next, too.
        pa.jemalloc_set_decay_ms(0)
        pa.set_memory_pool(pa.jemalloc_memory_pool())
    return False


def _count_cores() -> int:
    """Returns this rank's share of the process's cores, which the ranks of the node share."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // ranks)
