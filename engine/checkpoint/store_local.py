"""The stores' protocol, and the store on a mounted file system (a disk, NFS)."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Protocol

from rayzero.engine.checkpoint.errors import StoreError, store_errors
from rayzero.engine.checkpoint.format import partial_name

SMALL_FILE_BYTES = 64 * 2**20
"""The default limit of files that are read as a whole."""


@dataclass(frozen=True)
class StoreEntry:
    """A file or folder in a folder.

    Attributes:
        nbytes: size of a file; 0 for a folder.
        modified_s: seconds since 1970, by the store's clock.
        is_link: whether it is a symbolic link; the rest is of its target.
    """

    name: str
    is_folder: bool
    nbytes: int
    modified_s: float
    is_link: bool = False


class ReadStream(Protocol):
    """An open file for reading. `nbytes`: its size when it was opened."""

    url: str
    nbytes: int

    def read(self, offset: int, parts: Sequence[memoryview]) -> int:
        """Fill `parts` in sequence from byte `offset` of the file, in one request. Returns the
        number of bytes read, smaller than the size of the parts at the end of the file."""

    def close(self) -> None:
        """Safe to repeat."""


class Store(Protocol):
    """A folder and its content. Names are relative to it, with `/` between folders.

    All calls may raise StoreError. `url` is the folder's path or URL.
    """

    url: str

    def list_folder(self, folder: str = "") -> list[StoreEntry]:
        """The content of a folder; empty if it does not exist."""

    def find(self, name: str) -> StoreEntry | None:
        """A file or folder, or None if it does not exist."""

    def create(self, name: str, chunks: Iterable[memoryview]) -> None:
        """Create a file of these chunks, and its folders. The file appears under its name when it
        is durable; after an exception, also of the iterator, or a crash it does not exist. A chunk
        has been written when the next one is requested."""

    def replace(
        self, name: str, content: bytes, check: Callable[[], object] = lambda: None
    ) -> None:
        """Atomically replace a small file: afterwards either version exists, whatever happens. The
        new one is durable; remote stores read it back and compare.

        `check` is called at the last moment before a file is replaced, and may raise. A local
        store without a file to replace does not call it: it never replaces one that appears then.
        """

    def open(self, name: str) -> ReadStream:
        """Raises StoreError, of kind `gone` if the file does not exist, `unreadable` if it is not a
        regular file: a FIFO, a device or a folder would block, or never end."""

    def read(self, name: str, max_bytes: int = SMALL_FILE_BYTES) -> bytes:
        """Content of a file. Raises as `open` does, and `unreadable` if it is larger."""
        with closing(self.open(name)) as stream:
            if stream.nbytes > max_bytes:
                seen = f"has {stream.nbytes} bytes; at most {max_bytes} are read"
                raise StoreError("unreadable", stream.url, seen)
            content = bytearray(stream.nbytes)
            return bytes(memoryview(content)[: stream.read(0, [memoryview(content)])])

    def remove(self, name: str) -> None:
        """Remove a file durably, if it exists."""

    def remove_folder(self, name: str) -> None:
        """Remove a folder if it is empty."""


# O_NOFOLLOW: a symbolic link in place of the file would redirect the write to another folder.
_CREATE_FLAGS = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class LocalStore(Store):
    """A local folder. Durable by fsync of the file, rename, fsync of the folder, in that order."""

    def __init__(self, folder: Path) -> None:
        self.url = str(folder)
        self._folder = folder

    def list_folder(self, folder: str = "") -> list[StoreEntry]:
        path = self._folder / folder
        with store_errors(str(path)), suppress(FileNotFoundError), os.scandir(path) as entries:
            return [info for entry in entries if (info := _to_store_entry(entry)) is not None]
        return []

    def find(self, name: str) -> StoreEntry | None:
        path = self._folder / name
        with store_errors(str(path)), suppress(FileNotFoundError, NotADirectoryError):
            status = os.stat(path)
            folder = stat.S_ISDIR(status.st_mode)
            return StoreEntry(path.name, folder, 0 if folder else status.st_size, status.st_mtime)
        return None

    def create(self, name: str, chunks: Iterable[memoryview]) -> None:
        path = self._folder / name
        self._create(path, path.with_name(partial_name(path.name)), chunks, os.rename)

    def replace(
        self, name: str, content: bytes, check: Callable[[], object] = lambda: None
    ) -> None:
        def publish(partial: Path, path: Path) -> None:
            try:
                os.link(partial, path, follow_symlinks=False)
            except OSError:  # there is a file, or the file system has no hard links
                check()
                os.rename(partial, path)
            with suppress(OSError):
                os.unlink(partial)

        path = self._folder / name
        # Unique: another process may be writing the same file.
        partial = path.with_name(partial_name(path.name, token_hex(4)))
        self._create(path, partial, [memoryview(content)], publish)

    def _create(
        self, path: Path, partial: Path, chunks: Iterable[memoryview], publish: Callable[..., None]
    ) -> None:
        with store_errors(str(path)):
            _make_folder(path.parent)
            fd = os.open(partial, _CREATE_FLAGS, 0o666)
            try:
                try:
                    _write_chunks(fd, chunks)
                    os.fsync(fd)
                finally:
                    os.close(fd)
                publish(partial, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(partial)
                raise
            _sync_folder(path.parent)

    def open(self, name: str) -> LocalReadStream:
        path = self._folder / name
        with store_errors(str(path)):
            return LocalReadStream(path)

    def remove(self, name: str) -> None:
        path = self._folder / name
        with store_errors(str(path)), suppress(FileNotFoundError):
            os.unlink(path)
            _sync_folder(path.parent)

    def remove_folder(self, name: str) -> None:
        with suppress(OSError):  # not empty: the rest is not rayzero's
            os.rmdir(self._folder / name)


class LocalReadStream(ReadStream):
    """Reads directly into the caller's memory, unbuffered."""

    def __init__(self, path: Path) -> None:
        self.url = str(path)
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(self._fd)
        self.nbytes = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise StoreError("unreadable", self.url, "is not a regular file")

    def read(self, offset: int, parts: Sequence[memoryview]) -> int:
        done = 0
        with store_errors(self.url):
            for part in parts:
                while part:
                    count = os.preadv(self._fd, [part], offset + done)
                    if not count:
                        return done
                    done, part = done + count, part[count:]
        return done

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _write_chunks(fd: int, chunks: Iterable[memoryview]) -> None:
    offset = 0
    for chunk in chunks:
        done = 0
        while done < len(chunk):
            done += os.write(fd, chunk[done:])
        # Starts writeback now; the disk would otherwise be idle until fsync. Pages not yet written
        # stay cached, so a load soon afterwards finds most of them.
        os.posix_fadvise(fd, offset, done, os.POSIX_FADV_DONTNEED)
        offset += done


def _to_store_entry(entry: os.DirEntry[str]) -> StoreEntry | None:
    """None if the file was removed in the meantime, or is a link to nothing."""
    try:
        status = entry.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        return None
    nbytes = 0 if entry.is_dir() else status.st_size
    return StoreEntry(entry.name, entry.is_dir(), nbytes, status.st_mtime, entry.is_symlink())


def _make_folder(path: Path) -> None:
    """Create a folder and its parents, durably."""
    if path.is_dir():
        return
    _make_folder(path.parent)
    with suppress(FileExistsError):  # created by another rank's writer
        os.mkdir(path)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system syncs folders itself
            raise
    finally:
        os.close(fd)
