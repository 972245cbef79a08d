"""Folders of images: a row is a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from rayzero.engine.data.streams.sources.files import (
    FileSource,
    SourceFile,
    SourceReader,
    read_checked,
)
from rayzero.engine.data.streams.sources.formats import join_values
from rayzero.engine.data.streams.sources.index import listing_digest

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
_SCHEMA = pa.schema([("image", pa.binary()), ("label", pa.int64()), ("path", pa.string())])
_READS = 16  # files of a block at a time: each is a request


class ImageFolder(FileSource):
    """A source of image files. A row has `image` (the bytes of the file; decoding is the user's
    transform), `label` and `path` (in the folder).

    A block has files of `block_bytes` or more together, in the order of a hash of their paths: in
    the order of their names, a block would have the images of one label.

    Attributes:
        classes: the names of the labels, sorted, as in torchvision's ImageFolder. A file's label is
            its top-level folder, or, if the file is in no subfolder, the folder that contains it.
    """

    def __init__(
        self,
        name: str,
        files: Sequence[SourceFile],
        columns: Sequence[str] | None,
        block_bytes: int,
        retry_s: float,
    ) -> None:
        by_hash = sorted(
            files, key=lambda file: (xxhash.xxh3_64_digest(file.name.encode()), file.url)
        )
        super().__init__(name, by_hash, _SCHEMA, columns, retry_s)
        self.classes = sorted({_class_of(file) for file in files})
        self._starts = list(_cut(by_hash, block_bytes))
        self.counts: NDArray[np.int64] = np.diff([*self._starts, len(files)]).astype(np.int64)

    def read(self, block: int) -> pa.Table:
        """Returns all rows of a block. Thread-safe. Raises DataError, which names the file, if a
        file has changed or vanished, or its store fails for `retry_s`."""
        files = self.files[self._starts[block] : self._starts[block] + int(self.counts[block])]

        def read(file: SourceFile) -> memoryview:
            return read_checked(file, f"in block {block}", _read_all, self._retry_s)

        labels = {name: number for number, name in enumerate(self.classes)}
        columns = {
            "label": [labels[_class_of(file)] for file in files],
            "path": [file.name for file in files],
        }
        table = pa.table(columns, schema=_SCHEMA.remove(0))
        if "image" in self.schema.names:
            with ThreadPoolExecutor(_READS, "images") as pool:
                images = list(pool.map(read, files))
            table = table.append_column(_SCHEMA.field(0), join_values(images))
        return table.select(self.schema.names)

    def describe(self, block: int) -> str:
        first = self.files[self._starts[block]]
        return f"block {block}: {self.counts[block]} images from {first.url}"

    @property
    def fingerprint(self) -> str:
        options = f"images {self.schema.names} {self.classes} {self._starts}"
        return listing_digest(self.files, options)


def _read_all(reader: SourceReader) -> memoryview:
    return reader.read_at(0, reader.file.nbytes)


def _class_of(file: SourceFile) -> str:
    folder, slash, _ = file.name.partition("/")
    return folder if slash else file.url.split("/")[-2]


def _cut(files: Sequence[SourceFile], block_bytes: int) -> Iterator[int]:
    nbytes = block_bytes
    for number, file in enumerate(files):
        if nbytes >= block_bytes:
            yield number
            nbytes = 0
        nbytes += file.nbytes
