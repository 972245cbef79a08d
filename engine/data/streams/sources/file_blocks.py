"""Files of one format as a source of a stream, and the choice of the format."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from rayzero.engine.data.streams.sources.files import (
    FileSource,
    Paths,
    SourceFile,
    list_files,
    read_checked,
)
from rayzero.engine.data.streams.sources.formats import FileBlock, Format, Parquet
from rayzero.engine.data.streams.sources.image_folder import IMAGE_SUFFIXES, ImageFolder
from rayzero.engine.data.streams.sources.index import find_blocks, listing_digest
from rayzero.engine.data.streams.sources.json_lines import JsonLines
from rayzero.engine.data.streams.sources.webdataset import WebDataset
from rayzero.engine.errors import ConfigError, DataError, check_positive, did_you_mean

FormatName: TypeAlias = Literal["parquet", "json", "webdataset", "images"]
BLOCK_BYTES = 8 << 20
RETRY_S = 60.0

_COMPRESSED = ("", ".gz", ".zst", ".zstd")
_SUFFIXES: dict[FormatName, tuple[str, ...]] = {
    "parquet": (".parquet",),
    "json": tuple(f"{name}{end}" for name in (".jsonl", ".ndjson", ".json") for end in _COMPRESSED),
    "webdataset": (*(f".tar{end}" for end in _COMPRESSED), ".tgz"),
    "images": IMAGE_SUFFIXES,
}


class FileBlocks(FileSource):
    """The blocks of files, in the sequence of the files and of the blocks in them.

    Checksums find a change of a file that keeps its size and time: those of JSON lines, gzip,
    headers of tars, and pages of Parquet if the writer made them (`write_page_checksum`). Such a
    change is not found in images and in the files of a tar.

    Attributes:
        counts: int64, shape (blocks,).
    """

    def __init__(
        self,
        name: str,
        files: Sequence[SourceFile],
        form: Format,
        index: tuple[pa.Table, pa.Schema],
        columns: Sequence[str] | None,
        retry_s: float,
    ) -> None:
        super().__init__(name, files, index[1], columns, retry_s)
        self._index = index[0]
        self.counts = self._index["rows"].to_numpy()
        self._form = form

    def read(self, block: int) -> pa.Table:
        """Returns all rows of a block. Thread-safe. Raises DataError, which names file and block,
        if the file has changed, vanished or is damaged, or its store fails for `retry_s`."""
        file, place = self._find(block)
        read = partial(self._form.read, block=place, schema=self.schema)
        return read_checked(file, self._form.describe(place), read, self._retry_s)

    def describe(self, block: int) -> str:
        file, place = self._find(block)
        return f"{file.url}, {self._form.describe(place)}"

    def _find(self, block: int) -> tuple[SourceFile, FileBlock]:
        row = {name: self._index[name][block].as_py() for name in self._index.column_names}
        return self.files[row.pop("file")], FileBlock(**row)

    @property
    def file_numbers(self) -> NDArray[np.int32]:
        """The number of each block's file. int32, shape (blocks,)."""
        return self._index["file"].to_numpy()  # type: ignore[no-any-return]

    @property
    def fingerprint(self) -> str:
        listing = listing_digest(self.files, self._form.options)
        counts = xxhash.xxh3_128_hexdigest(self.counts.tobytes())
        return xxhash.xxh3_128_hexdigest(f"{listing} {counts} {self.schema}".encode())


def blocks(
    paths: Paths,
    columns: Sequence[str] | None = None,
    format: FormatName | None = None,  # noqa: A002
    *,
    index_dir: str | Path | None = None,
    block_bytes: int = BLOCK_BYTES,
    schema: pa.Schema | None = None,
    retry_s: float = RETRY_S,
) -> FileBlocks | ImageFolder:
    """Opens files as a source for `rayzero.data.stream` and `rayzero.data.mix`.

    Args:
        paths: a file, a folder, a pattern (`**` is any depth) or a list of them: paths, or URLs
            with s3, gs or hdfs. Their sequence, sorted by name within each, is that of the blocks.
        columns: the columns to read, or the suffixes of WebDataset tars; default all.
        format: parquet, json (lines; .gz and .zst too), webdataset (tar) or images (bytes, label by
            folder, path); default by the names of the files.
        index_dir: a folder or URL for the index of the blocks, which otherwise is made at each
            start: from footers, from headers of tars, or by reading all JSON lines once.
        block_bytes: the least size of a block, for formats that have no blocks of their own.
        schema: types of JSON lines, if keys have values of several; other keys are left out.
        retry_s: how long a read is repeated when the store fails.

    Raises:
        ConfigError: the files are of several formats, or an argument is wrong.
        DataError: there are no files or rows, a file is damaged, or a column is missing.
    """
    check_positive("blocks()", block_bytes=block_bytes)
    if isinstance(columns, str) or (columns is not None and len({*columns}) < max(1, len(columns))):
        raise ConfigError(f"columns is {columns!r}", "a list of names, each once", "columns")
    files = list_files(paths)
    chosen = format or _guess_format(files)
    if chosen not in _SUFFIXES:
        guess = did_you_mean(chosen, [*_SUFFIXES])
        raise ConfigError(f"format is {chosen!r}{guess}", ", ".join(_SUFFIXES), "format")
    if schema is not None and not (chosen == "json" and isinstance(schema, pa.Schema)):
        seen = f"schema is given for {chosen}: {schema!r}"
        raise ConfigError(seen, "a pyarrow.Schema, for json only", "schema")
    if isinstance(paths, str | Path) and (named := _of_format(files, chosen)):
        files = named
    name = str(paths) if isinstance(paths, str | Path) else files[0].url
    name = name.partition("?")[0] if "://" in name else name
    if chosen == "images":
        return ImageFolder(name, files, columns, block_bytes, retry_s)
    form: Format = WebDataset(block_bytes)
    if chosen == "parquet":
        form = Parquet(columns)
    elif chosen == "json":
        form = JsonLines(block_bytes, schema)
    index = find_blocks(files, form, None if index_dir is None else str(index_dir), retry_s)
    if not len(index[0]):
        raise DataError(f"{name} has no rows", "one row or more", "the path given to blocks")
    return FileBlocks(name, files, form, index, columns, retry_s)


def _guess_format(files: Sequence[SourceFile]) -> FormatName:
    found = [name for name in _SUFFIXES if _of_format(files, name)]
    if len(found) == 1:
        return found[0]
    mixed = f"the files are of several formats: {', '.join(found)}"
    raise ConfigError(
        mixed if found else f"{files[0].url} has a name of no known format",
        "; ".join(f"{name}: {', '.join(suffixes)}" for name, suffixes in _SUFFIXES.items()),
        "set format of blocks(), or give another path",
    )


def _of_format(files: Sequence[SourceFile], name: FormatName) -> list[SourceFile]:
    return [file for file in files if file.name.lower().endswith(_SUFFIXES[name])]
