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
"""Default size limit of files that are read as a whole."""


@dataclass(frozen=True)
class StoreEntry:
    """A file or folder in a folder.

    Attributes:
        nbytes: size of a file; 0 for a folder.
        modified_s: seconds since 1970, by the store's clock.
        is_link: whether the entry is a symbolic link. The other attributes describe its target.
    """

    name: str
    is_folder: bool
    nbytes: int
    modified_s: float
    is_link: bool = False


class ReadStream(Protocol):
    """A file that is open for reading. `nbytes` is the size that it had when it was opened."""

    url: str
    nbytes: int

    def read(self, offset: int, parts: Sequence[memoryview]) -> int:
        """Fills `parts` in sequence from byte `offset` of the file, in one request. Returns the
        number of bytes read, which is less than the size of `parts` at the end of the file."""

    def close(self) -> None:
        """Closes the file. Idempotent."""


class Store(Protocol):
    """A folder and its content. Names are relative to this folder, with `/` between folders.

    All methods may raise StoreError. `url` is the folder's path or URL.
    """

    url: str

    def list_folder(self, folder: str = "") -> list[StoreEntry]:
        """Returns the content of a folder; an empty list if the folder does not exist."""

    def find(self, name: str) -> StoreEntry | None:
        """Returns the entry of a file or folder; None if there is none."""

    def create(self, name: str, chunks: Iterable[memoryview]) -> None:
        """Creates a file from `chunks`, and the folders around it. The file appears under its name
        once it is durable. It does not exist after a crash, or after an exception, including one
        that `chunks` raises. A chunk has been written when the next one is requested."""

    def replace(
        self, name: str, content: bytes, check: Callable[[], object] = lambda: None
    ) -> None:
        """Atomically creates or replaces a small file: whatever happens, either the old or the new
        version exists. On return the new one is durable; remote stores read it back and compare.

        `check` is called immediately before a file is replaced, and may raise. A local store does
        not call `check` if the file does not exist: it then creates the file without replacing any.
        """

    def open(self, name: str) -> ReadStream:
        """Opens a file for reading. Raises StoreError, of kind `gone` if the file does not exist,
        `unreadable` if it is not a regular file: reading a FIFO or a device may never end."""

    def read(self, name: str, max_bytes: int = SMALL_FILE_BYTES) -> bytes:
        """Returns a file's content. Raises as `open`, and `unreadable` above `max_bytes`."""
        with closing(self.open(name)) as stream:
            if stream.nbytes > max_bytes:
                seen = f"has {stream.nbytes} bytes; at most {max_bytes} are read"
                raise StoreError("unreadable", stream.url, seen)
            content = bytearray(stream.nbytes)
            return bytes(memoryview(content)[: stream.read(0, [memoryview(content)])])

    def remove(self, name: str) -> None:
        """Removes a file durably, if it exists."""

    def remove_folder(self, name: str) -> None:
        """Removes a folder if it is empty."""


# O_NOFOLLOW: a symbolic link in place of the file would redirect the write to another folder.
_CREATE_FLAGS = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class LocalStore(Store):
    """A local folder. A new file is made durable by fsync of the file, rename, and fsync of the
    folder, in that order."""

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
        with suppress(OSError):  # not empty: the other files are not rayzero's
            os.rmdir(self._folder / name)


class LocalReadStream(ReadStream):
    """An open local file. Reads go directly into the caller's memory, unbuffered."""

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
    """Returns None if the file was removed in the meantime, or is a dangling link."""
    try:
        status = entry.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        return None
    nbytes = 0 if entry.is_dir() else status.st_size
    return StoreEntry(entry.name, entry.is_dir(), nbytes, status.st_mtime, entry.is_symlink())


def _make_folder(path: Path) -> None:
    """Creates a folder and its parents, durably."""
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
        if error.errno != errno.EINVAL:  # such a file system makes folder entries durable itself
            raise
    finally:
        os.close(fd)
