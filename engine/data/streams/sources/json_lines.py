"""JSON lines, plain or compressed: blocks of whole lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import pyarrow as pa
import pyarrow.json as pj
import xxhash

from rayzero.engine.data.streams.sources.files import SourceReader
from rayzero.engine.data.streams.sources.formats import FileBlock, Format, read_content

_LINE_BYTES = 1 << 16  # read after a block's bytes, for the end of its last line
_PARSED_BYTES = 1 << 20  # at a time


class JsonLines(Format):
    """A block has whole lines of `block_bytes` or more. A compressed file is one block, because it
    cannot be read from its middle.

    Types are found by parsing every line once: numbers are int64, or float64 if one in any file is
    not whole; texts stay texts, dates too; a key that a line lacks is null.
    """

    def __init__(self, block_bytes: int, schema: pa.Schema | None) -> None:
        self.options = f"json {block_bytes} {schema}"
        self._block_bytes = block_bytes
        self._schema = schema

    def scan(self, reader: SourceReader) -> tuple[list[FileBlock], pa.Schema]:
        blocks: list[FileBlock] = []
        schema = self._schema or pa.schema([])
        size = reader.file.nbytes
        read = partial(read_content, reader)
        pieces: Iterable[tuple[int, int, memoryview]] = _cut_lines(read, size, self._block_bytes)
        if reader.file.codec:
            pieces = [(0, size, read(0, size))]
        for start, nbytes, content in pieces:
            if not content or bytes(content).isspace():
                continue
            try:
                table = _parse(content, self._schema)
                if self._schema is None:
                    schema = self.merge(schema, _with_texts(table.schema))
            except (pa.ArrowException, ValueError) as error:
                raise ValueError(
                    f"bytes {start} to {start + nbytes}: {error} (if a key has values of several "
                    "types, give schema=)"
                ) from error
            checksum = xxhash.xxh3_64_intdigest(content)
            blocks.append(FileBlock(start, nbytes, table.num_rows, checksum))
        return blocks, schema

    def read(self, reader: SourceReader, block: FileBlock, schema: pa.Schema) -> pa.Table:
        content = read_content(reader, block.start, block.nbytes)
        if xxhash.xxh3_64_intdigest(content) != block.checksum:
            raise ValueError("its content is not what was indexed")
        # Parsing takes up to five times the memory of the text, so it is done in parts.
        parts = _cut_lines(
            lambda start, size: content[start : start + size], len(content), _PARSED_BYTES
        )
        texts = (part for _, _, part in parts if not bytes(part).isspace())
        return pa.concat_tables([_parse(part, schema) for part in texts])


def _cut_lines(
    read: Callable[[int, int], memoryview], size: int, least: int
) -> Iterator[tuple[int, int, memoryview]]:
    """Yields (first byte, number of bytes, content) of whole lines of `least` bytes or more
    together. Copies only the bytes in which a line may end: malloc would keep the memory of a copy,
    which `cache_bytes` does not count."""
    start = 0
    while start < size:
        nbytes = least + _LINE_BYTES
        end = 0
        while not end:
            content = read(start, nbytes)
            place = bytes(content[least - 1 :]).find(b"\n")
            if place >= 0:
                end = least + place
            elif start + nbytes >= size:
                end = len(content)
            nbytes *= 2
        yield start, end, content[:end]
        start += end


def _parse(content: memoryview, schema: pa.Schema | None) -> pa.Table:
    """Parses all lines as one chunk: pyarrow takes the types of the first chunk for all chunks."""
    return pj.read_json(
        pa.BufferReader(content),
        read_options=pj.ReadOptions(use_threads=False, block_size=len(content) + 1),
        parse_options=pj.ParseOptions(
            explicit_schema=schema,
            unexpected_field_behavior="infer" if schema is None else "ignore",
        ),
    )


def _with_texts(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_type(_as_text(field.type)) for field in schema])


def _as_text(kind: pa.DataType) -> pa.DataType:
    """Returns the type with strings for timestamps. pyarrow takes texts for timestamps if all of
    them look like one, so the type would depend on the block."""
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_as_text(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_as_text(field.type)) for field in kind])
    return kind
