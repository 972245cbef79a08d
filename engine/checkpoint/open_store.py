"""Open the store of a path or URL; stores on a mounted file system (a disk, NFS)."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from rayzero.engine.checkpoint.errors import StoreError, StoreErrorKind
from rayzero.engine.checkpoint.format import PARTIAL_SUFFIX
from rayzero.engine.checkpoint.store import Store, StoreEntry
from rayzero.engine.errors import ConfigError, did_you_mean

_REMOTE_SCHEMES = ("s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss")


def open_store(url: str) -> Store:
    """The store with this top folder: a path, or a file://, s3://, gs:// or hdfs:// URL. It need
    not exist yet.

    Raises:
        ConfigError: the URL's scheme is not supported, or an option in it is wrong.
        StoreError: the service cannot be reached.
    """
    if "://" not in url:
        return LocalStore(Path(url))
    scheme = urlsplit(url).scheme
    if scheme == "file":
        return LocalStore(Path(unquote(urlsplit(url).path)))
    if scheme not in _REMOTE_SCHEMES:
        raise ConfigError(
            f"checkpoints cannot be stored at {url}"
            f"{did_you_mean(scheme, [*_REMOTE_SCHEMES, 'file'])}",
            allowed="a path, or a URL with file, " + ", ".join(_REMOTE_SCHEMES),
            fix="checkpoint.path",
        )
    # Imported here: pyarrow takes longer to import than a vault to start, and disks do not need it.
    from rayzero.engine.checkpoint.store_remote import RemoteStore

    return RemoteStore(url)


_ERRNO_KINDS: Mapping[int, StoreErrorKind] = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EFBIG: "full",
    errno.ENOENT: "gone",
    errno.ENOTDIR: "gone",
    errno.ESTALE: "gone",
    errno.ENODEV: "gone",
    errno.EACCES: "forbidden",
    errno.EPERM: "forbidden",
    errno.EROFS: "forbidden",
    errno.ETIMEDOUT: "slow",
}

# O_NOFOLLOW: a symbolic link in place of the file would redirect the write to another folder.
_CREATE_FLAGS = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class LocalStore:
    """A local folder. Durable by fsync of the file, rename, fsync of the folder, in that order."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def url(self) -> str:
        return str(self._folder)

    def list_folder(self, folder: str = "") -> list[StoreEntry]:
        path = self._folder / folder
        with _store_errors(path), suppress(FileNotFoundError), os.scandir(path) as entries:
            return [found for entry in entries if (found := _to_store_entry(entry)) is not None]
        return []

    @contextmanager
    def create(self, name: str) -> Iterator[LocalWriteStream]:
        path = self._folder / name
        partial = path.with_name(f".{path.name}{PARTIAL_SUFFIX}")
        with _store_errors(path):
            _make_folder(path.parent)
            fd = os.open(partial, _CREATE_FLAGS, 0o666)
            try:
                try:
                    yield LocalWriteStream(fd)
                    os.fsync(fd)
                finally:
                    os.close(fd)
                os.rename(partial, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(partial)
                raise
            _sync_folder(path.parent)

    def replace(self, name: str, content: bytes) -> None:
        with self.create(name) as sink:
            sink.write(memoryview(content))

    def open(self, name: str) -> LocalReadStream:
        path = self._folder / name
        with _store_errors(path):
            return LocalReadStream(path)

    def read(self, name: str) -> bytes:
        path = self._folder / name
        with _store_errors(path):
            return path.read_bytes()

    def remove(self, name: str) -> None:
        path = self._folder / name
        with _store_errors(path), suppress(FileNotFoundError):
            os.unlink(path)
            _sync_folder(path.parent)

    def remove_folder(self, name: str) -> None:
        with suppress(OSError):  # not empty: the rest is not rayzero's
            os.rmdir(self._folder / name)


class LocalWriteStream:
    """Writes to a file descriptor that `create` owns and closes."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._written = 0

    def write(self, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.write(self._fd, data[done:])
        # Starts writeback now; the disk would otherwise be idle until fsync. Pages not yet written
        # stay cached, so a load soon afterwards finds most of them.
        os.posix_fadvise(self._fd, self._written, done, os.POSIX_FADV_DONTNEED)
        self._written += done


class LocalReadStream:
    """Reads directly into the caller's memory, unbuffered."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, offset: int, parts: Sequence[memoryview]) -> int:
        remaining = list(parts)
        done = 0
        with _store_errors(self._path):
            while remaining:
                count = os.preadv(self._fd, remaining, offset + done)
                if count == 0:
                    break
                done += count
                while remaining and count >= len(remaining[0]):
                    count -= len(remaining.pop(0))
                if remaining:
                    remaining[0] = remaining[0][count:]
        return done

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


@contextmanager
def _store_errors(path: Path) -> Iterator[None]:
    """Convert OSError to StoreError."""
    try:
        yield
    except OSError as error:
        kind = _ERRNO_KINDS.get(error.errno or 0, "other")
        raise StoreError(kind, str(path), error.strerror or repr(error)) from error


def _to_store_entry(entry: os.DirEntry[str]) -> StoreEntry | None:
    """None if the file was removed in the meantime."""
    try:
        status = entry.stat()
    except FileNotFoundError:
        return None
    nbytes = 0 if entry.is_dir() else status.st_size
    return StoreEntry(entry.name, entry.is_dir(), nbytes, status.st_mtime)


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
