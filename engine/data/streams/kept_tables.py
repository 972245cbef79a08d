"""Tables that are kept in a folder: indices of files and documents, and blocks that were made."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import xxhash

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.store import open_store
from rayzero.engine.errors import DataError

log = logging.getLogger("rayzero.engine")

_MAX_BYTES = 1 << 31
_DIGEST_BYTES = 16  # of xxh3-128, before the table


class KeptTables:
    """Tables in a folder by name, each with its checksum. Several workers may keep the same table
    at once: a file is replaced as a whole. Calls raise DataError if the store fails.

    Args:
        folder: a path or URL.
        setting: the name of the setting with the folder, for errors.
    """

    def __init__(self, folder: str | os.PathLike[str], setting: str) -> None:
        self._setting = setting
        with self._errors():
            self._store = open_store(os.fspath(folder), setting)

    def load(self, name: str) -> pa.Table | None:
        """Returns a table; None if it was not kept, or is damaged, which is logged."""
        with self._errors():
            if self._store.find(name) is None:
                return None
            raw = self._store.read(name, _MAX_BYTES)
        content = memoryview(raw)[_DIGEST_BYTES:]
        if xxhash.xxh3_128_digest(content) == raw[:_DIGEST_BYTES]:
            with pa.ipc.open_stream(pa.py_buffer(content)) as reader:
                return reader.read_all()
        log.warning("%s/%s is damaged: it is made again", self._store.url, name)
        return None

    def keep(self, name: str, table: pa.Table) -> None:
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
            writer.write_table(table)
        content = sink.getvalue()
        with self._errors():
            self._store.replace(name, b"".join([xxhash.xxh3_128_digest(content), content]))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            raise DataError(
                f"{self._setting} cannot be used: {error.seen}",
                "a folder that can be written, with free space",
                f"set {self._setting}",
            ) from error
