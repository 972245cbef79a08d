"""Datasets of Hugging Face's `datasets` as sources of a stream."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from rayzero.engine.data.streams.block import BlockSource
from rayzero.engine.data.streams.identity import digest_ends
from rayzero.engine.data.streams.readers import hf_steps
from rayzero.engine.errors import ConfigError, DataError, check_positive, named_errors

ROWS_PER_BLOCK = 1000  # what datasets writes as one record batch
MAX_SHARD_ROWS = 1 << 20
_COMPARED_SHARDS = 4
_NOT_BY_SHARD = {
    "BufferShuffledExamplesIterable": "shuffle(); rayzero.data.stream shuffles",
    "TakeExamplesIterable": "take(), which takes other rows of the shards",
    "SkipExamplesIterable": "skip(), which skips other rows of the shards",
}
"""Steps of `datasets` whose rows are not the rows of the shards, one shard after the other."""


def from_hf(
    dataset: Any, rows_per_block: int = ROWS_PER_BLOCK, counts: Sequence[int] | None = None
) -> BlockSource:
    """Makes a source of a `datasets.Dataset`, whose blocks are ranges of `rows_per_block` rows; or
    of an `IterableDataset`, whose blocks are its shards.

    Rows come as they are stored, as Arrow. A transform of the dataset itself is refused: give it to
    `rayzero.data.stream`. Nothing says how many rows a shard has, so each is read once to count
    them, unless `counts` has the rows of each shard: `source.shard_counts` of an earlier call. A
    shard that is shuffled by a buffer, endless, or of more than 2**20 rows is refused.

    Raises ConfigError for a dataset that cannot be read exactly; DataError if there are no rows.
    """
    # `datasets` is not a dependency: a caller that has a dataset has imported it.
    datasets: Any = sys.modules.get("datasets")
    if isinstance(dataset, getattr(datasets, "Dataset", ())):
        return HfRows(dataset, rows_per_block)
    if isinstance(dataset, getattr(datasets, "IterableDataset", ())):
        return HfShards(dataset, counts)
    raise ConfigError(
        f"from_hf got {type(dataset).__name__}",
        "a datasets.Dataset or a datasets.IterableDataset",
        "choose a split: dataset['train']",
    )


class HfRows:
    """Contiguous ranges of rows of a map-style dataset."""

    def __init__(self, dataset: Any, rows_per_block: int) -> None:
        check_positive("from_hf()", rows_per_block=rows_per_block)
        if not len(dataset):
            raise DataError("the dataset has no rows", "one row or more", "choose another split")
        if dataset.format["type"] == "custom":
            raise ConfigError(
                "the dataset has a transform (set_transform or with_transform)",
                "rows as they are stored",
                "rayzero.data.stream(source, transform=...), or dataset.map(...)",
            )
        self.name = dataset.info.dataset_name or "hf"
        self._bounds = np.append(np.arange(0, len(dataset), rows_per_block), len(dataset))
        self.counts = np.diff(self._bounds)
        self._dataset = dataset.with_format("arrow", columns=dataset.format["columns"])

    def read(self, block: int) -> pa.Table:
        """Returns all rows of a block. Thread-safe. Raises DataError that names the rows."""
        start, end = self._bounds[block : block + 2].tolist()
        with named_errors(
            lambda: f"{self.describe(block)} cannot be read",
            fix="restore the files of the dataset, or load it again",
        ):
            return self._dataset[start:end].replace_schema_metadata()

    def describe(self, block: int) -> str:
        start, end = self._bounds[block : block + 2].tolist()
        return f"{self.name}, rows {start} to {end}"

    @property
    def fingerprint(self) -> str:
        """Hashes the dataset's own fingerprint, which changes with its rows and every transform."""
        own = self._dataset.with_format(None)._fingerprint
        columns = self._dataset.format["columns"]
        return xxhash.xxh3_128_hexdigest(f"{own} {columns}".encode() + self.counts.tobytes())


class HfShards:
    """The shards of an iterable dataset, each read from its beginning.

    Attributes:
        counts: the rows of each block. An empty shard is no block.
        shard_counts: the rows of each shard.
    """

    def __init__(self, dataset: Any, counts: Sequence[int] | None) -> None:
        self.name = dataset.info.dataset_name or "hf"
        self._dataset = dataset.with_format("arrow")
        for step in hf_steps(dataset):
            if step in _NOT_BY_SHARD:
                raise ConfigError(
                    f"the iterable dataset has {_NOT_BY_SHARD[step]}",
                    "map, filter, select_columns",
                    "leave it out, or give the dataset to rayzero.data.iterable",
                )
        number = dataset.num_shards
        if counts is not None and len(counts) != number:
            raise ConfigError(f"{len(counts)} counts are given", f"{number}, the shards", "counts")
        found = [self._count(shard) for shard in range(number)] if counts is None else counts
        self.shard_counts = np.array(found, dtype=np.int64)
        self._shards = np.flatnonzero(self.shard_counts)
        self.counts = self.shard_counts[self._shards]
        if not len(self.counts):
            raise DataError("the dataset has no rows", "one row or more", "choose another split")

    def read(self, block: int) -> pa.Table:
        """Returns all rows of a shard; if it has become longer, more rows than were counted, which
        the caller refuses. Thread-safe. Raises DataError that names shard and row."""
        parts = list(self._read_parts(int(self._shards[block]), int(self.counts[block])))
        table = pa.concat_tables(parts, promote_options="permissive") if parts else pa.table({})
        return table.replace_schema_metadata()

    def _count(self, shard: int) -> int:
        rows = sum(map(len, self._read_parts(shard, MAX_SHARD_ROWS)))
        if rows > MAX_SHARD_ROWS:
            raise ConfigError(
                f"shard {shard} of {self.name} has more than {MAX_SHARD_ROWS} rows, or no end",
                "shards that fit in memory",
                "blocks(paths of its files), or dataset.to_parquet(path) and blocks(path)",
            )
        return rows

    def _read_parts(self, shard: int, limit: int) -> Iterator[pa.Table]:
        """Yields the rows of a shard, until there are more than `limit`."""
        rows = 0
        part = self._dataset.shard(self._dataset.num_shards, shard)
        with named_errors(
            lambda: f"{self.name}, shard {shard}, row {rows} or later cannot be read",
            fix="restore the files of the dataset, or correct its transform",
        ):
            for table in part.iter(batch_size=ROWS_PER_BLOCK):
                yield table
                rows += len(table)
                if rows > limit:
                    return

    def describe(self, block: int) -> str:
        return f"{self.name}, shard {self._shards[block]} of {self._dataset.num_shards}"

    @cached_property
    def fingerprint(self) -> str:
        """Hashes columns and counts, and rows at the beginning of a few shards, which it reads.
        Raises ConfigError if a shard has other rows each time."""
        counts = np.stack([self._shards, self.counts]).tobytes()
        columns = f"{self.name} {self._dataset.num_shards} {self._dataset.column_names}"
        compared = np.linspace(0, len(self._shards) - 1, _COMPARED_SHARDS, dtype=np.int64)
        shards = self._shards[np.unique(compared)].tolist()
        rows = [digest_ends(next(self._read_parts(shard, 0))) for shard in shards]
        if digest_ends(next(self._read_parts(shards[0], 0))) != rows[0]:
            raise ConfigError(
                f"shard {shards[0]} of {self.name} has other rows each time",
                "a dataset that yields the same rows each time",
                "give random changes of rows to rayzero.data.stream(transform=)",
            )
        return xxhash.xxh3_128_hexdigest(f"{columns} {rows}".encode() + counts)
