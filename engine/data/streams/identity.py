"""Compares what the order of a stream depends on with that of a training state."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import xxhash

from rayzero.engine.errors import DataError


def check_identity(saved: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises DataError if the training state was trained on a stream of another order. Both by
    the words of an error."""
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
    """Hashes the values of the first and the last row of a table, which has one."""
    rows = (table.slice(at, 1).columns for at in (0, len(table) - 1))
    values = [
        # Of a type of another library, whose values' text may differ from process to process.
        (chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk).to_pylist()
        for columns in rows
        for column in columns
        for chunk in column.chunks
    ]
    return xxhash.xxh3_128_hexdigest(repr(values).encode())
