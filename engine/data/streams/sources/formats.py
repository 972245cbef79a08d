"""The interface of a format of files, and Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayzero.engine.data.streams.sources.files import SourceReader
from rayzero.engine.errors import DataError

_CACHED_FOOTERS = 256
_MOST_BYTES = (1 << 31) - 1  # of a column of bytes, whose offsets are int32


@dataclass(frozen=True)
class FileBlock:
    """The place of a block in its file.

    Attributes:
        start: its first byte; in Parquet files the number of the row group.
        nbytes: its bytes in the file; of a row group, uncompressed.
        rows: 1 or more.
        checksum: xxh3-64 of its content, uncompressed; 0 if the format has checksums of its own.
    """

    start: int
    nbytes: int
    rows: int
    checksum: int = 0


class Format(Protocol):
    """Finds and reads the blocks of one file. Errors of any library mean that the file is damaged.

    Attributes:
        options: the settings that, with the file, determine which blocks the file has.
    """

    options: str

    def scan(self, reader: SourceReader) -> tuple[list[FileBlock], pa.Schema]:
        """Returns the blocks of a file, in sequence, and its columns."""
        ...

    def merge(self, schema: pa.Schema, other: pa.Schema) -> pa.Schema:
        """Returns columns for files with either of two schemas. Raises an error of pyarrow or
        ValueError if no columns fit both."""
        return pa.unify_schemas([schema, other], promote_options="permissive")

    def read(self, reader: SourceReader, block: FileBlock, schema: pa.Schema) -> pa.Table:
        """Returns the rows of a block, with exactly the columns of `schema`."""
        ...

    def describe(self, block: FileBlock) -> str:
        return f"bytes {block.start} to {block.start + block.nbytes}"


class Parquet(Format):
    """Row groups are the blocks. Checksums of pages are verified if the writer made them."""

    def __init__(self, columns: Sequence[str] | None) -> None:
        self.options = f"parquet {columns}"
        self._columns = columns
        # Footers of files that were read last: each is parsed once, not once for each row group.
        self._footers: dict[tuple[str, int, float], pq.FileMetaData] = {}

    def scan(self, reader: SourceReader) -> tuple[list[FileBlock], pa.Schema]:
        footer = self._footer(reader)
        groups = [footer.row_group(group) for group in range(footer.num_row_groups)]
        schema = footer.schema.to_arrow_schema().remove_metadata()
        if self._columns is not None:
            if missing := [name for name in self._columns if name not in schema.names]:
                seen = f"{reader.file.url} has no columns {missing}"
                raise DataError(seen, ", ".join(schema.names), "columns of blocks")
            schema = pa.schema([schema.field(name) for name in self._columns])
        blocks = [
            FileBlock(number, group.total_byte_size, group.num_rows)
            for number, group in enumerate(groups)
            if group.num_rows
        ]
        return blocks, schema

    def merge(self, schema: pa.Schema, other: pa.Schema) -> pa.Schema:
        types = dict(zip(schema.names, schema.types, strict=True))
        if types != dict(zip(other.names, other.types, strict=True)):
            raise ValueError(
                f"it has {_list_columns(other)}; the files before {_list_columns(schema)}"
            )
        return schema

    def read(self, reader: SourceReader, block: FileBlock, schema: pa.Schema) -> pa.Table:
        with pq.ParquetFile(
            pa.PythonFile(reader, mode="r"),
            metadata=self._footer(reader),
            # Otherwise columns are read one by one, and Arrow's pool holds half a block more.
            pre_buffer=True,
            page_checksum_verification=True,
        ) as file:
            table = file.read_row_group(block.start, columns=schema.names, use_threads=False)
        return table.select(schema.names).replace_schema_metadata()

    def describe(self, block: FileBlock) -> str:
        return f"row group {block.start}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._columns,)

    def _footer(self, reader: SourceReader) -> pq.FileMetaData:
        file = reader.file
        key = (file.url, file.nbytes, file.modified_s)
        footer = self._footers.get(key)
        if footer is None:
            footer = pq.read_metadata(pa.PythonFile(reader, mode="r"))
            if len(self._footers) >= _CACHED_FOOTERS:
                self._footers.clear()
            self._footers[key] = footer
        return footer


def read_content(reader: SourceReader, start: int, nbytes: int) -> memoryview:
    """Returns the content of a range of a file. The range of a compressed file is the whole file,
    which may have several frames, and is decompressed."""
    raw = reader.read_at(start, nbytes)
    if not reader.file.codec:
        return raw
    with pa.CompressedInputStream(pa.BufferReader(raw), reader.file.codec) as stream:
        return memoryview(stream.read())


def join_values(values: Sequence[memoryview | None]) -> pa.Array:
    """Returns a column of bytes. Copies the values once, into memory of Arrow's pool, which can
    return it to the system. Raises ValueError if the values have 2 GiB or more."""
    ends = np.cumsum([0, *(0 if value is None else len(value) for value in values)])
    if ends[-1] > _MOST_BYTES:
        raise ValueError(f"{ends[-1]} bytes of a column in one block; at most {_MOST_BYTES}")
    memory = pa.allocate_buffer(int(ends[-1]))
    content = memoryview(memory).cast("B")
    for value, start, end in zip(values, map(int, ends), map(int, ends[1:]), strict=False):
        if value is not None:
            content[start:end] = value
    present = pa.array([value is not None for value in values], pa.bool_()).buffers()[1]
    offsets = pa.py_buffer(ends.astype(np.int32))
    return pa.Array.from_buffers(pa.binary(), len(values), [present, offsets, memory])


def _list_columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
