"""Object stores and HDFS, through pyarrow: s3://, gs://, hdfs://."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pyarrow import ArrowException, fs

from rayzero.engine.checkpoint.errors import StoreError, store_errors
from rayzero.engine.checkpoint.format import PARTIAL_SUFFIX
from rayzero.engine.checkpoint.store_local import ReadStream, Store, StoreEntry
from rayzero.engine.errors import ConfigError

_READ_BACK_MISMATCH = (
    "the store returned different bytes than were written; an older S3-compatible store may need "
    "AWS_REQUEST_CHECKSUM_CALCULATION=when_required in the environment"
)
_EDGE_BYTES = 64 * 1024  # read back from the beginning and the end of a written file


class RemoteStore(Store):
    """An object store or HDFS. Confirmed writes are read back and compared."""

    def __init__(self, url: str, setting: str = "checkpoint.path", *, retries: bool = True) -> None:
        """Opens a URL. Its query may have options, as pyarrow's `FileSystem.from_uri` accepts them:
        `s3://bucket/path?endpoint_override=host:port&scheme=http`. Credentials are found where the
        service's own tools find them: environment variables, files, instance metadata. Without
        `retries` S3's client does not retry requests. Raises ConfigError if pyarrow does not accept
        the URL."""
        self.url = url
        self._setting = setting
        self._retries = retries
        try:
            with store_errors(url):
                self._fs, self._root = fs.FileSystem.from_uri(_with_default_options(url))
        except (ArrowException, ValueError) as error:
            raise ConfigError(
                f"the URL {url} cannot be used: {error}",
                allowed="a path, or a URL that pyarrow.fs.FileSystem.from_uri accepts",
                fix=setting,
            ) from None
        if self._fs.type_name == "s3" and not retries:
            self._fs = _without_retries(self._fs)

    def __reduce__(self) -> Any:  # pyarrow pickles a file system without its retry strategy
        return partial(RemoteStore, retries=self._retries), (self.url, self._setting)

    def list_folder(self, folder: str = "") -> list[StoreEntry]:
        path = self._path(folder)
        selector = fs.FileSelector(path, allow_not_found=True)
        with self._errors(folder):
            return [
                _to_store_entry(info)
                for info in self._fs.get_file_info(selector)
                if info.path.rstrip("/") != path
            ]

    def find(self, name: str) -> StoreEntry | None:
        with self._errors(name):
            info = self._fs.get_file_info(self._path(name))
        return None if info.type == fs.FileType.NotFound else _to_store_entry(info)

    def create(self, name: str, chunks: Iterable[memoryview]) -> None:
        path = self._path(name)
        nbytes = 0
        head = b""
        tail = b""
        with self._errors(name):
            stream = self._fs.open_output_stream(path, compression=None)
            try:
                for chunk in chunks:
                    stream.write(chunk)
                    nbytes += len(chunk)
                    head += chunk[: _EDGE_BYTES - len(head)]
                    tail = (tail + bytes(chunk[-_EDGE_BYTES:]))[-_EDGE_BYTES:]
                stream.close()
                self._verify_upload(name, nbytes, head, tail)
            except BaseException:
                # pyarrow cannot abort an upload: closing completes it
                with suppress(OSError):
                    stream.close()
                with suppress(OSError):
                    self._fs.delete_file(path)
                raise

    def replace(
        self, name: str, content: bytes, check: Callable[[], object] = lambda: None
    ) -> None:
        """Writes with one PUT, which is atomic. HDFS shows files while they are written, so there
        the file is written under another name and moved; for a moment neither version exists."""
        moved = self._fs.type_name == "hdfs"
        written = f"{name}{PARTIAL_SUFFIX}" if moved else name
        check()
        with self._errors(name):
            with self._fs.open_output_stream(self._path(written), compression=None) as stream:
                stream.write(content)
            if self.read(written, len(content) + _EDGE_BYTES) != content:
                raise StoreError("other", self._display_url(name), _READ_BACK_MISMATCH)
            if moved:
                check()
                with suppress(FileNotFoundError):
                    self._fs.delete_file(self._path(name))
                self._fs.move(self._path(written), self._path(name))

    def open(self, name: str) -> RemoteReadStream:
        with self._errors(name):
            return RemoteReadStream(
                self._fs.open_input_file(self._path(name)), self._display_url(name)
            )

    def remove(self, name: str) -> None:
        with self._errors(name), suppress(FileNotFoundError):
            self._fs.delete_file(self._path(name))

    def remove_folder(self, name: str) -> None:
        if not self.list_folder(name):
            with suppress(OSError):  # most object stores have no folders to remove
                self._fs.delete_dir(self._path(name))

    def _verify_upload(self, name: str, nbytes: int, head: bytes, tail: bytes) -> None:
        """Compares size, beginning and end of the stored file. Some S3-compatible stores save an
        upload's chunk framing as content, which this detects without reading the whole file."""
        path, url = self._path(name), self._display_url(name)
        size = self._fs.get_file_info(path).size
        if size != nbytes:
            seen = f"{nbytes} bytes were written, {size} are stored. {_READ_BACK_MISMATCH}"
            raise StoreError("other", url, seen)
        with self._fs.open_input_file(path) as file:
            first, last = file.read_at(len(head), 0), file.read_at(len(tail), nbytes - len(tail))
        if (first, last) != (head, tail):
            raise StoreError("other", url, _READ_BACK_MISMATCH)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _display_url(self, name: str) -> str:
        return f"{self.url.partition('?')[0].rstrip('/')}/{name}".rstrip("/")

    def _errors(self, name: str) -> AbstractContextManager[None]:
        return store_errors(self._display_url(name))


class RemoteReadStream(ReadStream):
    """An open remote file. A read is one request, where a stream with read-ahead needs hundreds."""

    def __init__(self, file: Any, url: str) -> None:
        self._file = file
        self.url = url
        self.nbytes: int = file.size()

    def read(self, offset: int, parts: Sequence[memoryview]) -> int:
        with store_errors(self.url):
            self._file.seek(offset)
            if len(parts) == 1:
                return int(self._file.readinto(parts[0]))
            content = memoryview(self._file.read(sum(len(part) for part in parts)))
        done = 0
        for part in parts:
            data = content[done : done + len(part)]
            part[: len(data)] = data
            done += len(data)
        return done

    def close(self) -> None:
        self._file.close()


def _without_retries(file_system: Any) -> Any:
    """Returns a copy of an S3 file system that does not retry requests; the file system itself if
    the copy differs in other options, because pyarrow's `__reduce__` omits some of them."""
    kind, options = type(file_system), file_system.__reduce__()[1][0]
    copy = kind(**options, retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1))
    return copy if copy == file_system else file_system


def _to_store_entry(info: Any) -> StoreEntry:
    return StoreEntry(
        info.base_name,
        info.type == fs.FileType.Directory,
        info.size or 0,
        info.mtime_ns / 1e9 if info.mtime_ns else 0.0,
    )


def _with_default_options(url: str) -> str:
    """Adds default options to an S3 URL: the environment's region, because pyarrow would otherwise
    ask AWS for it even with another endpoint; and `allow_delayed_open`, which writes a small file
    with one PUT, so that a manifest appears atomically."""
    parts = urlsplit(url)
    if parts.scheme != "s3":
        return url
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    options = {"allow_delayed_open": "true"} | ({"region": region} if region else {})
    query = parts.query.split("&") if parts.query else []
    given = parse_qs(parts.query)
    query += [f"{key}={value}" for key, value in options.items() if key not in given]
    return f"{url.partition('?')[0]}?{'&'.join(query)}"
