"""A state source that tells how much was read of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rayzero.engine.state.source import StateSource
from rayzero.engine.state.table import Table


class Counted:
    """`source`, with `progress` told the bytes of every read as it ends."""

    def __init__(self, source: StateSource, progress: Callable[[int], None]) -> None:
        self._source = source
        self._progress = progress

    @property
    def step(self) -> int:
        return self._source.step

    @property
    def tables(self) -> Sequence[Table]:
        return self._source.tables

    def small(self, rank: int) -> dict[str, Any]:
        return self._source.small(rank)

    def read(self, block: int, offset: int, into: memoryview) -> None:
        self._source.read(block, offset, into)
        self._progress(into.nbytes)

    def close(self) -> None:
        self._source.close()
