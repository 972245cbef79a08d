"""Where a training state can be read from: replicas' slots, a checkpoint's files, anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rayzero.engine.state.table import Table


class StateSource(Protocol):
    """A whole training state of one step, cut into blocks of bytes in any way."""

    @property
    def step(self) -> int:
        """Finished steps in the state."""

    @property
    def tables(self) -> Sequence[Table]:
        """What each block holds. Blocks may overlap; together they hold everything."""

    def small(self, rank: int) -> dict[str, Any]:
        """The state's JSON part as that rank had it; another rank's when there was no such rank."""

    def read(self, block: int, offset: int, into: memoryview) -> None:
        """Fills `into` (bytes, writable) from byte `offset` of a block.

        Raises:
            DataError: those bytes are damaged or gone; it names the file or slot.
        """

    def close(self) -> None:
        """Lets go of what it reads from. Safe to repeat."""
