"""Sources whose tables a function makes of another source's, such as tokens of texts."""

from __future__ import annotations

import os
from collections.abc import Callable

import pyarrow as pa
import xxhash

from rayzero.engine.data.streams.block import BlockSource, check_source
from rayzero.engine.data.streams.kept_tables import KeptTables
from rayzero.engine.errors import ConfigError, DataError, named_errors

TableFunction = Callable[[pa.Table], pa.Table]


class MappedBlocks:
    """A source whose blocks are what a function makes of another source's: tokens of texts.

    The function is called in the threads that read ahead, several at once, for one block at a time.
    If it is too slow for a worker's cores, let Ray's tasks run it:
    `from_ray(dataset.map_batches(...))`.

    Args:
        function: returns, for the table of a block, a table with as many rows. It must be
            deterministic: a block may be made again, on any worker.
        cache: a folder or URL that all workers reach, and that keeps made blocks: each block is
            then made once, unless two workers need it at the same time. A file has a checksum; a
            damaged one is made again. Nothing is removed: each `version` has a folder of its own.
        version: identifies what the function does, its tokenizer included. Required with a cache;
            otherwise the function's name.

    Raises:
        ConfigError: there is a cache and no version, or the cache's URL cannot be used.
    """

    def __init__(
        self,
        source: BlockSource,
        function: TableFunction,
        cache: str | os.PathLike[str] | None = None,
        version: str | None = None,
    ) -> None:
        if cache is not None and not version:
            raise ConfigError(
                "map_blocks() has a cache and no version",
                "a name of what the function does, such as 'llama-3 tokens, 2048'",
                "set version; change it with the function, or blocks of the former one are read",
            )
        check_source(source, "map_blocks()")
        version = version or getattr(function, "__qualname__", type(function).__qualname__)
        self.name = source.name
        self.counts = source.counts
        self.describe = source.describe
        self.fingerprint = f"{source.fingerprint} mapped: {version}"
        self._source = source
        self._function = function
        self._kept = None if cache is None else KeptTables(cache, "cache of map_blocks()")

    def read(self, block: int) -> pa.Table:
        """Returns all rows of a block. Thread-safe. Raises DataError, which names the block, if the
        source or the function fails, or the cache cannot be used."""
        if self._kept is None:
            return self._make(block)
        name = f"{xxhash.xxh3_128_hexdigest(self.fingerprint.encode())}/{block}.arrow"
        table = self._kept.load(name)
        if table is None or len(table) != self.counts[block]:
            table = self._make(block)
            self._kept.keep(name, table)
        return table

    def _make(self, block: int) -> pa.Table:
        table = self._source.read(block)
        with named_errors(
            lambda: f"the function of map_blocks() failed on {self.describe(block)}",
            fix="correct the function, or the data",
        ):
            made = self._function(table)
        if not isinstance(made, pa.Table) or len(made) != len(table):
            seen = f"{len(made)} rows" if isinstance(made, pa.Table) else f"a {type(made).__name__}"
            raise DataError(
                f"the function of map_blocks() made {seen} of {self.describe(block)}",
                f"a pyarrow.Table of its {len(table)} rows",
                "filter rows before, when the files are written, or pack documents by PackedBlocks",
            )
        return made


map_blocks = MappedBlocks
