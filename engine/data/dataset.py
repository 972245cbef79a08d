"""A map-style dataset over Parquet token shards."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from glob import glob, has_magic
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from rayzero.engine.errors import ConfigError, DataError

TOKEN_COLUMN = "tokens"


class ParquetTokens:
    """Sequences of `context + 1` consecutive tokens from Parquet shards, read on demand.

    The format: every shard has a column `tokens` of a plain integer type (uint8, uint16, int32,
    ...), one token a row and none missing. The shards, sorted by path, are one stream of tokens;
    sample i is the tokens from `i * context` to `(i + 1) * context`, both included, so that inputs
    do not overlap and every token but the first is a target once.

    Counts come from the shards' footers. Row groups are read through a memory map and the most
    recently decoded ones are cached, so small row groups (about 256 Ki tokens) make random reads
    cheap. Thread-safe; pickled as its arguments. Raises DataError if there are no shards, they are
    not Parquet, have no integer column `tokens`, or hold less than one sample.

    Args:
        path: a folder (searched for `*.parquet` at any depth), a file, or a glob pattern.
        context: the input tokens of a sample.
        cached_row_groups: number of decoded row groups in the cache.
    """

    def __init__(self, path: str | Path, context: int, cached_row_groups: int = 64) -> None:
        for name, value in (("context", context), ("cached_row_groups", cached_row_groups)):
            if value < 1:
                raise ConfigError(f"{name} is {value}", "1 or more", f"ParquetTokens({name}=...)")
        self.path = Path(path)
        self.context = context
        self.cached_row_groups = cached_row_groups
        self._footers = {shard: _read_footer(shard) for shard in find_shards(path)}
        self._row_groups = [
            (shard, group)
            for shard, footer in self._footers.items()
            for group in range(footer.num_row_groups)
        ]
        rows = [self._footers[shard].row_group(group).num_rows for shard, group in self._row_groups]
        # The first token of each row group, then the end.
        self._row_group_starts: list[int] = [0, *accumulate(rows)]
        # Thread-safe: two threads that miss at once both read, and one result is cached.
        self._read_row_group_cached = lru_cache(maxsize=cached_row_groups)(self._read_row_group)
        if not len(self):
            raise DataError(
                f"{path} holds {self.num_tokens} tokens",
                f"at least {context + 1}: one sample is context + 1 tokens",
                "the data, or a smaller context",
            )

    @property
    def num_tokens(self) -> int:
        """Tokens in all shards together."""
        return self._row_group_starts[-1]

    def __len__(self) -> int:
        return max(0, self.num_tokens - 1) // self.context

    def __getitem__(self, index: int) -> torch.Tensor:
        """Sample `index`: int64, shape (context + 1,)."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index % len(self) * self.context
        end = start + self.context + 1
        tokens = np.empty(self.context + 1, dtype=np.int64)
        group = bisect_right(self._row_group_starts, start) - 1
        position = start
        while position < end:
            first = self._row_group_starts[group]
            part = self._read_row_group_cached(group)[position - first : end - first]
            tokens[position - start :][: len(part)] = part
            position += len(part)
            group += 1
        return torch.from_numpy(tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.context, self.cached_row_groups)

    def _read_row_group(self, group: int) -> np.ndarray[Any, np.dtype[np.integer[Any]]]:
        shard, local = self._row_groups[group]
        # With the footer given, opening parses nothing, so no file is kept open between reads.
        with pq.ParquetFile(shard, metadata=self._footers[shard], memory_map=True) as file:
            column = file.read_row_group(local, columns=[TOKEN_COLUMN], use_threads=False)[
                TOKEN_COLUMN
            ]
        if column.null_count:
            raise DataError(
                f"{column.null_count} missing tokens in row group {local} of {shard}",
                "a token in every row",
                "the shard",
            )
        return column.to_numpy()  # type: ignore[no-any-return]


def find_shards(path: str | Path) -> list[Path]:
    """The sorted shards of `path`: a file, a folder or a glob pattern."""
    path = Path(path)
    where = path.absolute()
    if path.is_file():
        return [path]
    if path.is_dir():
        shards = sorted(path.rglob("*.parquet"))
    elif has_magic(str(path)):
        shards = sorted(map(Path, glob(str(path), recursive=True)))
    else:
        raise DataError(
            f"no data at {where}", "a folder, a file or a glob pattern", "the data path"
        )
    if not shards:
        raise DataError(
            f"no Parquet shards at {where}", "one *.parquet file or more", "the data path"
        )
    return shards


def _read_footer(shard: Path) -> pq.FileMetaData:
    """Read the shard's footer and check that it has an integer column of tokens."""
    try:
        footer = pq.read_metadata(shard)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{shard} cannot be read: {error}", "a Parquet file", "the shard"
        ) from error
    schema = footer.schema.to_arrow_schema()
    allowed = f"a column {TOKEN_COLUMN!r} of a plain integer type, one token a row"
    if TOKEN_COLUMN not in schema.names:
        raise DataError(f"{shard} has the columns {schema.names}", allowed, "the shard")
    kind = schema.field(TOKEN_COLUMN).type
    if not pa.types.is_integer(kind):
        raise DataError(f"{TOKEN_COLUMN!r} in {shard} is of type {kind}", allowed, "the shard")
    return footer
