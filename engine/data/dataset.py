"""A map-style dataset over Parquet token shards."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from rayzero.engine.data.streams.sources.file_blocks import blocks
from rayzero.engine.errors import DataError, check_positive

TOKEN_COLUMN = "tokens"


class ParquetTokens:
    """Sequences of `context + 1` consecutive tokens from Parquet shards, read on demand.

    The format: every shard has a column `tokens` of a plain integer type (uint8, uint16, int32,
    ...), one token a row and none missing. The shards, sorted by path, are one stream of tokens;
    sample i is the tokens from `i * context` to `(i + 1) * context`, both included, so that inputs
    do not overlap and every token but the first is a target once.

    Counts come from the shards' footers. The most recently decoded row groups are cached, so small
    ones (about 256 Ki tokens) make random reads cheap. Thread-safe; pickled as its arguments.
    Raises DataError if there are no shards, they are not Parquet, have no integer column `tokens`,
    or hold less than one sample.

    Args:
        path: a folder (searched for `*.parquet` at any depth), a file, or a glob pattern; also a
            URL, as in `rayzero.data.blocks`.
        context: number of input tokens of a sample.
        cached_row_groups: number of decoded row groups in the cache.
    """

    def __init__(self, path: str | Path, context: int, cached_row_groups: int = 64) -> None:
        check_positive("ParquetTokens()", context=context, cached_row_groups=cached_row_groups)
        self.path = path
        self.context = context
        self.cached_row_groups = cached_row_groups
        self._blocks = blocks(path, [TOKEN_COLUMN], "parquet")
        # The first token of each row group, then the end.
        self._starts = np.append(0, np.cumsum(self._blocks.counts))
        # Thread-safe: two threads that miss at once both read, and one result is cached.
        self._read_cached = lru_cache(maxsize=cached_row_groups)(self._read)
        if not pa.types.is_integer(kind := self._blocks.schema.field(TOKEN_COLUMN).type):
            raise DataError(
                f"{TOKEN_COLUMN!r} in {path} is of type {kind}",
                f"a column {TOKEN_COLUMN!r} of a plain integer type, one token a row",
                "the shards",
            )
        if not len(self):
            raise DataError(
                f"{path} holds {self.num_tokens} tokens",
                f"at least {context + 1}: one sample is context + 1 tokens",
                "the data, or a smaller context",
            )

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all shards together."""
        return int(self._starts[-1])

    def __len__(self) -> int:
        return max(0, self.num_tokens - 1) // self.context

    def __getitem__(self, index: int) -> torch.Tensor:
        """Returns sample `index`: int64, shape (context + 1,)."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index % len(self) * self.context
        end = start + self.context + 1
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        last = int(np.searchsorted(self._starts, end))
        parts = []
        for group in range(first, last):
            before = int(self._starts[group])
            parts.append(self._read_cached(group)[max(0, start - before) : end - before])
        return torch.from_numpy(np.concatenate(parts, dtype=np.int64))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.context, self.cached_row_groups)

    def _read(self, group: int) -> np.ndarray[Any, np.dtype[np.integer[Any]]]:
        column = self._blocks.read(group)[TOKEN_COLUMN]
        if column.null_count:
            raise DataError(
                f"{column.null_count} missing tokens in {self._blocks.describe(group)}",
                "a token in every row",
                "the shard",
            )
        return column.to_numpy()  # type: ignore[no-any-return]
