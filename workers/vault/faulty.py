"""Writing checkpoint files where faults are injected; off unless a job's file lists some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.writer import write_rank_file
from rayzero.workers.faults import parse
from rayzero.workers.injector import FaultRecord, Schedule, StoreFaults
from rayzero.workers.messages import FaultFired, RankFile
from rayzero.workers.vault.files import WriteFile


def writer(faults: Sequence[str], output_dir: str) -> WriteFile:
    """What a vault writes files with: the plain writer, unless the store is to fail."""
    due = [fault for fault in map(parse, faults) if fault.kind in ("full_disk", "slow_store")]
    if not due:
        return write_rank_file
    store = StoreFaults(Schedule(due, FaultRecord(output_dir), _recorded))

    def write(
        folder: str, rank: int, table: Any, small: dict[str, Any], *more: Any, **named: Any
    ) -> RankFile:
        try:
            store.before_write(int(small["step"]), rank)
        except OSError as error:
            raise StoreError("full", folder, error.strerror or "") from error
        return write_rank_file(folder, rank, table, small, *more, **named)

    return write


def _recorded(fired: FaultFired) -> None:
    """The record is all that a vault tells: it has no way up but its answers."""
