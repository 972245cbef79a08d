"""The store protocol, which local folders and object stores implement; paths and URLs of stores."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit


@dataclass(frozen=True)
class StoreEntry:
    """A file or folder in a folder.

    Attributes:
        nbytes: size of a file; 0 for a folder.
        modified_s: seconds since 1970, by the store's clock.
    """

    name: str
    is_folder: bool
    nbytes: int
    modified_s: float


class WriteStream(Protocol):
    """An open file for writing."""

    def write(self, data: memoryview) -> None:
        """Append all of `data`, which may be modified afterwards."""


class ReadStream(Protocol):
    """An open file for reading."""

    def read(self, offset: int, parts: Sequence[memoryview]) -> int:
        """Fill `parts` in sequence from byte `offset` of the file, in one request.

        Returns:
            The number of bytes read, smaller than the size of the parts at the end of the file.
        """

    def close(self) -> None:
        """Safe to repeat."""


class Store(Protocol):
    """A folder and its content. Names are relative to it, with `/` between folders.

    All calls may raise StoreError.
    """

    @property
    def url(self) -> str:
        """Path or URL of the folder."""

    def list_folder(self, folder: str = "") -> list[StoreEntry]:
        """The content of a folder; empty if it does not exist."""

    def create(self, name: str) -> AbstractContextManager[WriteStream]:
        """Create a file and its folders. The file appears under its name, durable, at the end of
        the `with`; after an exception or a crash it does not exist."""

    def replace(self, name: str, content: bytes) -> None:
        """Atomically replace a small file: afterwards either version exists, whatever happens. The
        new one is durable; remote stores read it back and compare."""

    def open(self, name: str) -> ReadStream:
        """
        Raises:
            StoreError: of kind `gone` if the file does not exist.
        """

    def read(self, name: str) -> bytes:
        """Content of a small file. Raises as `open` does."""

    def remove(self, name: str) -> None:
        """Remove a file durably, if it exists."""

    def remove_folder(self, name: str) -> None:
        """Remove a folder if it is empty."""


def is_remote(url: str) -> bool:
    """Whether a path or URL is outside this machine's file systems."""
    return "://" in url and urlsplit(url).scheme != "file"


def join_url(url: str, *names: str) -> str:
    """Join names to a path or URL; a URL's query stays at the end."""
    base, mark, query = _split_options(url)
    return "/".join([base.rstrip("/"), *names]) + mark + query


def split_url(url: str) -> tuple[str, str]:
    """Parent folder and name of a path or URL."""
    base, mark, query = _split_options(url)
    parent, slash, name = base.rstrip("/").rpartition("/")
    return (parent or slash or ".") + mark + query, name


def _split_options(url: str) -> tuple[str, str, str]:
    """A URL without its query, the question mark, and the query."""
    return url.partition("?") if "://" in url else (url, "", "")
