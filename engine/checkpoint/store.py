"""What a place for checkpoints must be able to do, whatever it is: a folder, an object store."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit


@dataclass(frozen=True)
class StoreEntry:
    """One thing in a folder.

    Attributes:
        nbytes: of a file; 0 for a folder.
        modified_s: seconds since 1970, by the store's clock.
    """

    name: str
    is_folder: bool
    nbytes: int
    modified_s: float


class WriteStream(Protocol):
    """A file that is being written."""

    def write(self, data: memoryview) -> None:
        """Appends all of `data`, which may be changed again after that."""


class ReadStream(Protocol):
    """A file that is being read."""

    def read(self, offset: int, parts: Sequence[memoryview]) -> int:
        """Fills `parts` one behind the other from byte `offset` of the file, in one request.

        Returns:
            The bytes read: fewer than the parts hold where the file ends.
        """

    def close(self) -> None:
        """Safe to repeat."""


class Store(Protocol):
    """A folder and what is below it. Names are relative to it, with `/` between folders.

    All calls may raise StoreError.
    """

    @property
    def url(self) -> str:
        """The folder, as users call it."""

    def list_folder(self, folder: str = "") -> list[StoreEntry]:
        """What is in a folder; nothing when it is not there."""

    def create(self, name: str) -> AbstractContextManager[WriteStream]:
        """A new file, and the folders it is in. At the end of the `with` it is durable under its
        name; when that is left by an exception, or the process dies, it is not there at all."""

    def replace(self, name: str, content: bytes) -> None:
        """Puts a small file in the place of what is there: afterwards it is the one or the other,
        whatever happens. It is durable, and was read back and compared."""

    def open(self, name: str) -> ReadStream:
        """
        Raises:
            StoreError: of kind `gone`, if there is no such file.
        """

    def read(self, name: str) -> bytes:
        """All of a small file. Raises as `open` does."""

    def remove(self, name: str) -> None:
        """Removes a file, durably; none there is fine."""

    def remove_folder(self, name: str) -> None:
        """Removes a folder, unless something is left in it."""


def is_remote(url: str) -> bool:
    """Whether a path or URL is in another place than this machine's file systems."""
    return "://" in url and urlsplit(url).scheme != "file"


def join_url(url: str, *names: str) -> str:
    """The path or URL of something in a folder; a URL's options stay at its end."""
    base, mark, query = _split_options(url)
    return "/".join([base.rstrip("/"), *names]) + mark + query


def split_url(url: str) -> tuple[str, str]:
    """The folder that something is in, and its name there."""
    base, mark, query = _split_options(url)
    parent, slash, name = base.rstrip("/").rpartition("/")
    return (parent or slash or ".") + mark + query, name


def _split_options(url: str) -> tuple[str, str, str]:
    """What is in front of a URL's options, the question mark, and the options."""
    return url.partition("?") if "://" in url else (url, "", "")
