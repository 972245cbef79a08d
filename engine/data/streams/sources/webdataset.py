"""WebDataset tars: consecutive files of one basename are a sample."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

import pyarrow as pa

from rayzero.engine.data.streams.sources.files import SourceReader
from rayzero.engine.data.streams.sources.formats import FileBlock, Format, join_values, read_content

KEY = "__key__"
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)
_HEADERS_BYTES = 1 << 16  # size of a request for headers: smaller members share one


@dataclass
class _Sample:
    """The files of a sample. `parts` has, by suffix, first byte and size of a file in the tar."""

    key: str
    start: int
    parts: dict[str, tuple[int, int]] = field(default_factory=dict)


class WebDataset(Format):
    """A row has `__key__`, the path up to the first dot of the basename, and the bytes of each
    suffix in lower case; null if a sample has no file of a suffix. Files without a suffix, and
    those whose names begin with a dot, are left out, as WebDataset does.

    Headers are read once. A block is a range of samples of `block_bytes` or more; a compressed tar
    is one block, because it cannot be read from its middle.
    """

    def __init__(self, block_bytes: int) -> None:
        self.options = f"tar {block_bytes}"
        self._block_bytes = block_bytes

    def scan(self, reader: SourceReader) -> tuple[list[FileBlock], pa.Schema]:
        codec = reader.file.codec
        suffixes: dict[str, None] = {}
        blocks: list[FileBlock] = []
        start = 0
        rows = 0
        end = reader.file.nbytes
        stream: IO[bytes] = io.BufferedReader(reader, _HEADERS_BYTES)
        if codec:
            stream = io.BytesIO(read_content(reader, 0, end))
        for sample in _read_samples(stream):
            suffixes.update(dict.fromkeys(sample.parts))
            if not codec and rows and sample.start - start >= self._block_bytes:
                blocks.append(FileBlock(start, sample.start - start, rows))
                start = sample.start
                rows = 0
            rows += 1
        if rows:
            blocks.append(FileBlock(start, end - start, rows))
        fields = [pa.field(suffix, pa.binary()) for suffix in sorted(suffixes)]
        return blocks, pa.schema([pa.field(KEY, pa.string()), *fields])

    def read(self, reader: SourceReader, block: FileBlock, schema: pa.Schema) -> pa.Table:
        content = read_content(reader, block.start, block.nbytes)
        samples = list(_read_samples(pa.BufferReader(content)))
        columns: dict[str, Any] = {
            suffix: join_values([_slice(content, sample.parts.get(suffix)) for sample in samples])
            for suffix in schema.names
            if suffix != KEY
        }
        if KEY in schema.names:
            columns[KEY] = [sample.key for sample in samples]
        return pa.table({name: columns[name] for name in schema.names}, schema=schema)


def _slice(content: memoryview, place: tuple[int, int] | None) -> memoryview | None:
    return None if place is None else content[place[0] : place[0] + place[1]]


def _read_samples(stream: IO[bytes]) -> Iterator[_Sample]:
    """Yields the samples of a tar. Raises ValueError for a damaged header, which tarfile would take
    for the end of the tar."""
    sample: _Sample | None = None
    with tarfile.open(fileobj=stream, mode="r:") as tar:
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # tarfile keeps all members
            name = _NAME.fullmatch(member.name)
            if not member.isfile() or name is None:
                continue
            suffix = name[2].lower()
            if sample is None or sample.key != name[1]:
                if sample is not None:
                    yield sample
                sample = _Sample(name[1], member.offset)
            if suffix in sample.parts:
                raise ValueError(f"the sample {sample.key} has two files {suffix}")
            sample.parts[suffix] = (member.offset_data, member.size)
        stream.seek(tar.offset)
        if stream.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise ValueError(f"there is no header of a file at byte {tar.offset}")
    if sample is not None:
        yield sample
