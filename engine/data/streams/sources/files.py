"""The files of a source: listing, reads that outlast failures of a store, and checks that a file
is still the one that was listed."""

from __future__ import annotations

import io
import tarfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import pyarrow as pa

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.store import is_remote, open_store, split_url
from rayzero.engine.checkpoint.store_local import ReadStream, Store, StoreEntry
from rayzero.engine.errors import CONTENT_ERRORS, ConfigError, DataError, first_line

T = TypeVar("T")
Paths: TypeAlias = str | Path | Sequence[str | Path]

_SETTING = "the path given to rayzero.data.blocks"
_CONTENT_ERRORS = (
    OSError,
    EOFError,
    pa.ArrowException,
    tarfile.TarError,
    zlib.error,
    *CONTENT_ERRORS,
)
_PASSING: tuple[str, ...] = ("slow", "other")
"""Kinds of errors of a store that may pass."""
_CODECS = {".gz": "gzip", ".tgz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True)
class SourceFile:
    """A file as it was listed.

    Attributes:
        name: path in the store, with `/` between folders.
        modified_s: seconds since 1970; whole seconds in object stores, whose answers differ in the
            fractions.
    """

    store: Store
    name: str
    nbytes: int
    modified_s: float

    @property
    def url(self) -> str:
        """The path or URL, without options."""
        return f"{self.store.url.partition('?')[0].rstrip('/')}/{self.name}"

    @property
    def codec(self) -> str:
        """The compression, by the file's name: gzip or zstd; empty if there is none."""
        return _CODECS.get(self.name[self.name.rfind(".") :].lower(), "")


class FileSource:
    """Base class of the sources that read files.

    Attributes:
        files: the files as they were listed.
        schema: the columns of every block.
        is_local: whether all files are in local folders: reads then use a core, rather than wait.

    Raises DataError if one of `columns` is not in the schema.
    """

    def __init__(
        self,
        name: str,
        files: Sequence[SourceFile],
        schema: pa.Schema,
        columns: Sequence[str] | None,
        retry_s: float,
    ) -> None:
        if twice := sorted({column for column in schema.names if schema.names.count(column) > 1}):
            raise DataError(f"{name} has several columns {twice}", "names that differ", "the files")
        chosen = schema.names if columns is None else columns
        if missing := [column for column in chosen if column not in schema.names]:
            raise DataError(
                f"{name} has no columns {missing}", ", ".join(schema.names), "columns of blocks"
            )
        self.name = name
        self.files = files
        self.schema = pa.schema([schema.field(column) for column in chosen])
        self.is_local = not any(is_remote(file.store.url) for file in files)
        self._retry_s = retry_s


class SourceReader(io.RawIOBase):
    """An open file. Each read that fails for a reason that may pass is repeated on a new
    connection, at growing intervals, until `retry_s` have passed since its first failure."""

    def __init__(self, file: SourceFile, retry_s: float) -> None:
        self.file = file
        self._retry_s = retry_s
        self._stream: ReadStream | None = None
        self._position = 0

    def read_at(self, start: int, nbytes: int) -> memoryview:
        """Returns `nbytes` bytes from byte `start`; fewer at the end of the file."""
        size = max(0, min(nbytes, self.file.nbytes - start))
        # In memory of Arrow's pool, as the table is: `release_unused` returns it to the system.
        content = memoryview(pa.allocate_buffer(size)).cast("B")
        done = self._repeat(lambda: self._open().read(start, [content])) if content else 0
        if done < len(content):
            raise StoreError("unreadable", self.file.url, f"ends at byte {start + done}")
        return content

    def change(self) -> str:
        """Returns how the file differs from the one that was listed; empty if it does not."""
        entry = self._repeat(lambda: self.file.store.find(self.file.name))
        if entry is None:
            return "has vanished"
        now = _listed(self.file.store, self.file.name, entry)
        if now == self.file:
            return ""
        return (
            f"has changed since it was listed: {now.nbytes} bytes of time {now.modified_s}, "
            f"{self.file.nbytes} bytes of time {self.file.modified_s} then"
        )

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.file.nbytes}
        self._position = base[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> Any:
        """Returns a buffer, without the copy that bytes would need."""
        content = self.read_at(self._position, self.file.nbytes if size < 0 else size)
        self._position += len(content)
        return content

    def readinto(self, buffer: Any) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        stream = self._stream
        self._stream = None
        if stream is not None:
            stream.close()
        super().close()

    def _open(self) -> ReadStream:
        if self._stream is None:
            self._stream = self.file.store.open(self.file.name)
        return self._stream

    def _repeat(self, call: Callable[[], T]) -> T:
        end_s = 0.0
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return call()
            except StoreError as error:
                now_s = time.monotonic()
                end_s = end_s or now_s + self._retry_s
                if error.kind not in _PASSING or now_s + pause_s > end_s:
                    raise
                if self._stream is not None:
                    self._stream.close()
                    self._stream = None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def read_checked(
    file: SourceFile, where: str, read: Callable[[SourceReader], T], retry_s: float
) -> T:
    """Returns the result of `read`. Then checks that the file is still the one that was listed, so
    that no content of another file passes. Raises DataError that names the file and `where`, the
    place in it. An empty `where` says that the source is still being opened."""
    problem = ""
    cause: Exception | None = None
    with closing(SourceReader(file, retry_s)) as reader:
        try:
            result = read(reader)
        except StoreError as error:
            cause = error
            problem = f"cannot be read: {error.seen}"
        except _CONTENT_ERRORS as error:
            cause = error
            problem = f"is damaged: {first_line(error)}"
        # A store that does not answer is not asked again.
        if not isinstance(cause, StoreError) or cause.damage:
            try:
                problem = reader.change() or problem
            except StoreError as error:
                cause = cause or error
                problem = problem or f"cannot be read: {error.seen}"
    if problem:
        raise DataError(
            f"{file.url}{where and ', '}{where} {problem}",
            "files that stay as they were when the source was opened" if where else "whole files",
            "restore the file, or start again with the files of today"
            if where
            else "correct the file, or set format, schema or columns of blocks()",
        ) from cause
    return result


def list_files(paths: Paths) -> list[SourceFile]:
    """Returns the files of a path, a URL, a pattern or a list of them; sorted by name within each.

    A folder is searched at any depth. In patterns `**` stands for folders at any depth; `?` begins
    a URL's options, so it stands for a letter in paths only. Files and folders whose names begin
    with `.` or `_` are left out, and so are links to folders. Raises DataError if there are no
    files; ConfigError if a file is listed twice: its rows would come twice.
    """
    given: Any = paths if isinstance(paths, Iterable) and not isinstance(paths, str) else [paths]
    several = [str(path or "") for path in given]
    if not several or not all(several):
        raise ConfigError(f"blocks() got {paths!r}", "a path, a URL, a pattern or a list", _SETTING)
    files: dict[str, SourceFile] = {}
    for path in several:
        try:
            found = list(_list_path(path))
        except StoreError as error:
            raise DataError(f"{path} cannot be listed: {error.seen}", fix=_SETTING) from error
        if not found:
            raise DataError(f"no files at {path}", "a file, a folder or a pattern", _SETTING)
        for file in found:
            if file.url in files:
                raise ConfigError(f"{file.url} is given twice", "each file once", _SETTING)
            files[file.url] = file
    return list(files.values())


def _list_path(path: str) -> Iterator[SourceFile]:
    folder = path if is_remote(path) or "://" in path else str(Path(path).absolute())
    pattern: list[str] = []
    parent, name = split_url(folder)
    is_top = "://" in folder and "/" not in folder.partition("://")[2].partition("?")[0].rstrip("/")
    entry = None if is_top else open_store(parent, _SETTING).find(name)
    if entry is not None and not entry.is_folder:
        yield _listed(open_store(parent, _SETTING, retries=False), name, entry)
        return
    while entry is None and has_magic(folder.partition("?")[0] if "://" in folder else folder):
        folder, name = split_url(folder)
        pattern.insert(0, name)
    store = open_store(folder, _SETTING)
    reads = open_store(folder, _SETTING, retries=False)  # `SourceReader` repeats them
    depth = len(pattern) if pattern and "**" not in pattern else None
    for name, entry in _walk(store, "", depth):
        if not pattern or _matches(name.split("/"), pattern):
            yield _listed(reads, name, entry)


def _walk(store: Store, folder: str, depth: int | None) -> Iterator[tuple[str, StoreEntry]]:
    """Yields the files of a folder by name; of `depth` levels, or of all."""
    for entry in sorted(store.list_folder(folder), key=lambda entry: entry.name):
        name = f"{folder}/{entry.name}".lstrip("/")
        if entry.name.startswith((".", "_")):
            continue
        if not entry.is_folder:
            yield name, entry
        elif not entry.is_link and depth != 1:
            yield from _walk(store, name, None if depth is None else depth - 1)


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern or not names:
        return not names and all(part == "**" for part in pattern)
    if pattern[0] == "**":
        return _matches(names, pattern[1:]) or _matches(names[1:], pattern)
    return fnmatchcase(names[0], pattern[0]) and _matches(names[1:], pattern[1:])


def _listed(store: Store, name: str, entry: StoreEntry) -> SourceFile:
    modified_s = float(int(entry.modified_s)) if is_remote(store.url) else entry.modified_s
    return SourceFile(store, name, entry.nbytes, modified_s)
