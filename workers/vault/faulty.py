"""Writing checkpoint files where the store may be made to fail."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from typing import Any

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.writer import write_rank_file
from rayzero.workers.faults import parse
from rayzero.workers.injector import FaultRecord, Schedule, StoreFaults
from rayzero.workers.messages import FaultFired, RankFile


class FaultyStore:
    """Writes one file at a time, as `WriteFile`; the rest may be called by any thread.

    Args:
        faults: of the job, as text; those of other places are left to them.
        output_dir: where the record is kept of those that happened.
    """

    def __init__(self, faults: Iterable[str], output_dir: str) -> None:
        self._fired: deque[FaultFired] = deque()
        self._schedule = Schedule((), FaultRecord(output_dir), self._fired.append)
        self._store = StoreFaults(self._schedule)
        self.want(faults)

    def want(self, faults: Iterable[str]) -> None:
        """All the job's faults from now on."""
        self._schedule.want(parse(text) for text in faults)

    def fired(self) -> list[FaultFired]:
        """Those that happened since this was last asked."""
        return [self._fired.popleft() for _ in range(len(self._fired))]

    def close(self) -> None:
        """Ends every wait of a slow store, now and later."""
        self._store.close()

    def write(
        self, folder: str, rank: int, table: Any, small: dict[str, Any], *more: Any, **named: Any
    ) -> RankFile:
        try:
            self._store.before_write(int(small["step"]), rank)
        except OSError as error:  # told as a real one is
            path = os.path.join(folder, f"rank-{rank:05d}")
            raise StoreError("full", path, error.strerror or "") from error
        return write_rank_file(folder, rank, table, small, *more, **named)
