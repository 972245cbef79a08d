"""What a place for checkpoints must be able to do, whatever it is: a folder, an object store."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Entry:
    """One thing in a folder.

    Attributes:
        nbytes: of a file; 0 for a folder.
        modified_s: seconds since 1970, by the store's clock.
    """

    name: str
    is_folder: bool
    nbytes: int
    modified_s: float


class Sink(Protocol):
    """A file that is being written."""

    def write(self, data: memoryview) -> None:
        """Appends all of `data`, which may be changed again after that."""


class OpenFile(Protocol):
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

    def entries(self, folder: str = "") -> list[Entry]:
        """What is in a folder; nothing when it is not there."""

    def create(self, name: str) -> AbstractContextManager[Sink]:
        """A new file, and the folders it is in. At the end of the `with` it is durable under its
        name; when that is left by an exception, or the process dies, it is not there at all."""

    def replace(self, name: str, content: bytes) -> None:
        """Puts a small file in the place of what is there: afterwards it is the one or the other,
        whatever happens. It is durable, and was read back and compared."""

    def open(self, name: str) -> OpenFile:
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
