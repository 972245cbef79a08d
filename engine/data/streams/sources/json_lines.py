"""JSON lines, plain or compressed: blocks of whole lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.json as pj
import xxhash

from rayzero.engine.data.streams.sources.compressed import Piece, codec_of, decompress, read_frames
from rayzero.engine.data.streams.sources.files import SourceReader
from rayzero.engine.data.streams.sources.formats import FileBlock

_LINE_BYTES = 1 << 16  # read after a block's bytes, for the end of its last line


class JsonLines:
    """Blocks end where a line ends, after `block_bytes` or more uncompressed bytes.

    A compressed file is cut between frames only: one of a single frame is one block. Types are
    found by parsing every line once: whole numbers are int64, or float64 if some are not whole in
    any file; texts stay texts, dates too; a key that a line lacks is null.
    """

    name = "JSON lines"

    def __init__(self, block_bytes: int, schema: pa.Schema | None) -> None:
        self.options = f"json {block_bytes} {schema}"
        self._block_bytes = block_bytes
        self._schema = schema

    def scan(self, reader: SourceReader) -> tuple[list[FileBlock], pa.Schema]:
        codec = codec_of(reader.file.name)
        pieces = read_frames(reader, codec) if codec else self._pieces(reader)
        blocks: list[FileBlock] = []
        schema = self._schema or pa.schema([])
        for start, nbytes, content in self._join_lines(pieces):
            if not content.strip():
                continue
            try:
                table = _parse(content, self._schema)
                if self._schema is None:
                    schema = self.merge(schema, _with_texts(table.schema))
            except (pa.ArrowException, ValueError) as error:
                raise ValueError(
                    f"{self._describe(start, nbytes)}: {error} (if a key has values of several "
                    "types, give schema=)"
                ) from error
            checksum = xxhash.xxh3_64_intdigest(content)
            blocks.append(FileBlock(start, nbytes, table.num_rows, checksum))
        return blocks, schema

    def merge(self, schema: pa.Schema, other: pa.Schema) -> pa.Schema:
        return pa.unify_schemas([schema, other], promote_options="permissive")

    def read(self, reader: SourceReader, block: FileBlock, schema: pa.Schema) -> pa.Table:
        raw = reader.read_at(block.start, block.nbytes)
        content = decompress(codec_of(reader.file.name), raw)
        if xxhash.xxh3_64_intdigest(content) != block.checksum:
            raise ValueError("its content is not what was indexed")
        return _parse(content, schema)

    def describe(self, block: FileBlock) -> str:
        return self._describe(block.start, block.nbytes)

    def _describe(self, start: int, nbytes: int) -> str:
        return f"bytes {start} to {start + nbytes}"

    def _pieces(self, reader: SourceReader) -> Iterator[Piece]:
        """Whole lines of a plain file."""
        start = 0
        while start < reader.file.nbytes:
            nbytes = self._block_bytes + _LINE_BYTES
            end = 0
            while not end:
                raw = reader.read_at(start, nbytes).tobytes()
                end = raw.find(b"\n", self._block_bytes - 1) + 1
                if start + len(raw) == reader.file.nbytes:
                    end = end or len(raw)
                nbytes *= 2
            content = raw[:end]
            yield start, len(content), content
            start += len(content)

    def _join_lines(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Pieces together, so that each ends with a line and is as large as a block."""
        first = 0
        end = 0
        content = bytearray()
        for start, nbytes, part in pieces:
            first = first if content else start
            end = start + nbytes
            content += part
            if content.endswith(b"\n") and len(content) >= self._block_bytes:
                yield first, end - first, bytes(content)
                content = bytearray()
        if content:
            yield first, end - first, bytes(content)


def _parse(content: bytes, schema: pa.Schema | None) -> pa.Table:
    """All lines as one chunk: types would be those of the first chunk, and wrong for the others."""
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
    """The type without times: texts that look like times are such only until another does not."""
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_as_text(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_as_text(field.type)) for field in kind])
    return kind
