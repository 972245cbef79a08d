"""The interface of a source of blocks. Imports no torch."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import pyarrow

from rayzero.engine.data.sampling import Integers
from rayzero.engine.errors import ConfigError


@runtime_checkable
class BlockSource(Protocol):
    """Rows in blocks, in a fixed order: Parquet row groups, parts of a JSON lines file, tars.

    Attributes:
        name: for errors and metrics.
        counts: int64, shape (blocks,): the rows of each block, 1 or more.
    """

    name: str
    counts: Integers

    def read(self, block: int) -> pyarrow.Table:
        """Returns all rows of one block. Called by several threads at once. Raises DataError that
        names file and block."""
        ...

    def describe(self, block: int) -> str:
        """Returns where a block is, for errors: `s3://b/a.parquet, row group 3`."""
        ...

    @property
    def fingerprint(self) -> str:
        """Identifies the data: a string that changes with the files, counts or columns. It is part
        of the training state, and is compared when that is loaded."""
        ...


def describe_block(source: BlockSource, block: int) -> str:
    return f"block {block} of {source.name!r} ({source.describe(block)})"


def check_source(given: Any, call: str) -> None:
    """Raises ConfigError if a call got something other than a source."""
    if not all(hasattr(given, name) for name in ("name", "counts", "read", "describe")):
        raise ConfigError(
            f"{call} got a {type(given).__name__}",
            "a source of blocks",
            "give it rayzero.data.blocks(paths), from_hf(dataset), from_ray(dataset), or what "
            "map_blocks and PackedBlocks make of one",
        )
