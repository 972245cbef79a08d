"""Compares the values that the order of a stream depends on with those in a training state."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import xxhash

from rayzero.engine.errors import DataError


def check_identity(saved: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises DataError if the training state was trained on a stream of another order. Both
    mappings have the values under the names that the error uses."""
    for name in [*saved, *now]:
        if saved.get(name) != now.get(name):
            raise DataError(
                f"the training state was trained on a stream with {name}: "
                f"{saved.get(name, 'none')}; now: {now.get(name, 'none')}",
                allowed="the same data, seed, windows and weights, in the same order",
                fix="restore the files or the settings, or begin a new job with the weights "
                "of this one",
            )


def digest_ends(table: pa.Table) -> str:
    """Hashes the values of the first and the last row of a table, which has one row or more."""
    rows = (table.slice(row, 1).columns for row in (0, len(table) - 1))
    values = [
        # The stored values of another library's type: its own may print otherwise in each process.
        (chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk).to_pylist()
        for columns in rows
        for column in columns
        for chunk in column.chunks
    ]
    return xxhash.xxh3_128_hexdigest(repr(values).encode())
