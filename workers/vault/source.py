"""A whole training state read from slots, as a new engine begins from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayzero.engine.errors import DataError
from rayzero.engine.state.table import Table
from rayzero.workers.vault.images import Image, read_small, read_table


class VaultSource:
    """A `StateSource` over the images of one step. Owns them until `close`. For one thread.

    What describes the data is checked at once, the data itself before it is first read: a rank that
    needs nothing of a slot does not touch it.

    Raises:
        DataError: a slot is gone or damaged.
    """

    def __init__(self, step: int, images: Sequence[Image], verify: bool = True) -> None:
        if not images:
            raise DataError(f"the state of step {step} has no slot to be read from")
        self._step = step
        self._images = images
        self._tables = [read_table(one) for one in images]
        self._smalls = {one.ref.rank: read_small(one) for one in images}
        self._unverified = set(range(len(images))) if verify else set()

    @property
    def step(self) -> int:
        return self._step

    @property
    def tables(self) -> Sequence[Table]:
        return self._tables

    def small(self, rank: int) -> dict[str, Any]:
        return self._smalls[rank if rank in self._smalls else min(self._smalls)]

    def read(self, block: int, offset: int, into: memoryview) -> None:
        image = self._images[block]
        if block in self._unverified:
            image.verify()
            self._unverified.remove(block)
        end = image.header.geometry.data_bytes
        if not 0 <= offset <= end - len(into):
            raise DataError(f"bytes {offset} to {offset + len(into)} of a slot", f"0 to {end}")
        image.read(image.header.geometry.data_at + offset, into)

    def close(self) -> None:
        for one in self._images:
            one.close()
