"""Reading an image: mapped from shared memory, or fetched piece by piece from another node."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

import numpy as np
from xxhash import xxh3_64_intdigest

from rayzero.engine.state.table import Table
from rayzero.workers.messages import SlotRef
from rayzero.workers.vault.errors import SlotDamagedError, SlotGoneError
from rayzero.workers.vault.header import HEADER_BYTES, Header, Status
from rayzero.workers.vault.slots import read_header

CHUNK_BYTES = 16 * 2**20
"""How much of an image crosses nodes at once."""

Fetch: TypeAlias = Callable[[SlotRef, int, int], memoryview]
"""(version, offset, length) -> those bytes of an image on another node; fewer where it ends."""


def name_of(ref: SlotRef) -> str:
    """A version's name in messages."""
    return (
        f"the slot of generation {ref.generation}, rank {ref.rank}, step {ref.step} "
        f"on node {ref.node_id}"
    )


class Image(Protocol):
    """The bytes of one whole version, counted from its header's first byte."""

    @property
    def ref(self) -> SlotRef: ...

    @property
    def header(self) -> Header: ...

    def read(self, offset: int, into: memoryview) -> None:
        """Fills `into` from byte `offset`.

        Raises:
            SlotGoneError: the version is not there any more.
        """

    def verify(self) -> None:
        """Compares the data with the checksum that its writer took, if it took one.

        Raises:
            SlotDamagedError: they differ.
        """

    def close(self) -> None:
        """Lets go of the memory. Safe to repeat."""


class MappedImage:
    """A version in this node's shared memory.

    Args:
        fd: its buffer; it may be closed afterwards.
        header: what the buffer is going to say of itself; None: what it says.

    Raises:
        SlotGoneError: another version is in the buffer, or none.
    """

    def __init__(self, ref: SlotRef, fd: int, header: Header | None = None) -> None:
        self._ref = ref
        self._header = header = whole(header or read_header(fd), ref)
        self._map = mmap.mmap(fd, header.geometry.nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        self._bytes = memoryview(self._map)

    @property
    def ref(self) -> SlotRef:
        return self._ref

    @property
    def header(self) -> Header:
        return self._header

    @property
    def data(self) -> memoryview:
        """The state's bytes, read-only."""
        geometry = self._header.geometry
        return self._bytes[geometry.data_at : geometry.data_at + geometry.data_bytes]

    def read(self, offset: int, into: memoryview) -> None:
        copy(into, self._bytes[offset : offset + len(into)])

    def verify(self) -> None:
        wanted = self._header.data_checksum
        if wanted is not None and xxh3_64_intdigest(self.data) != wanted:
            raise _damaged(self._ref, "its data")

    def close(self) -> None:
        self._bytes.release()
        # What somebody's view of `data` still uses stays mapped until that view is gone.
        with suppress(BufferError):
            self._map.close()


class FetchedImage:
    """A version on another node, read through a window of one chunk.

    Reads come in rising order mostly, so most are answered from the chunk at hand.
    """

    def __init__(self, ref: SlotRef, fetch: Fetch) -> None:
        self._ref = ref
        self._fetch = fetch
        self._start, self._window = 0, memoryview(b"")
        first = bytearray(HEADER_BYTES)
        self.read(0, memoryview(first))
        self._header = whole(Header.decode(bytes(first)), ref)

    @property
    def ref(self) -> SlotRef:
        return self._ref

    @property
    def header(self) -> Header:
        return self._header

    def read(self, offset: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            skip = offset + done - self._start
            if not 0 <= skip < len(self._window):
                self._start, skip = offset + done, 0
                self._window = self._fetch(self._ref, self._start, CHUNK_BYTES)
                if not self._window:
                    raise SlotGoneError(f"{name_of(self._ref)} ends at byte {self._start}")
            part = self._window[skip : skip + len(into) - done]
            copy(into[done : done + len(part)], part)
            done += len(part)

    def verify(self) -> None:
        """Nothing: its vault compared the checksum before it gave away the first byte."""

    def close(self) -> None:
        self._window = memoryview(b"")


def whole(header: Header | None, ref: SlotRef) -> Header:
    """That header, if it is of that version, and the version is whole.

    Raises:
        SlotGoneError: it is not.
    """
    if header is None or header.status is not Status.COMPLETE or not _is_of(header, ref):
        raise SlotGoneError(f"{name_of(ref)} is gone: dropped, overwritten, or never finished")
    return header


def read_table(image: Image) -> Table:
    """What lies where in the data."""
    geometry = image.header.geometry
    text = _checked(
        image, geometry.table_at, geometry.table_bytes, image.header.table_checksum, "its table"
    )
    return Table.from_json(json.loads(text))


def read_small(image: Image) -> dict[str, Any]:
    """The state's JSON part."""
    header = image.header
    small: dict[str, Any] = json.loads(
        _checked(
            image,
            header.geometry.small_at,
            header.small_bytes,
            header.small_checksum,
            "its JSON part",
        )
    )
    return small


def copy(into: memoryview, source: memoryview) -> None:
    """Copies bytes of the same number, without holding up other threads as a slice would."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


def _checked(image: Image, offset: int, length: int, checksum: int, part: str) -> bytes:
    text = bytearray(length)
    image.read(offset, memoryview(text))
    if xxh3_64_intdigest(text) != checksum:
        raise _damaged(image.ref, part)
    return bytes(text)


def _damaged(ref: SlotRef, part: str) -> SlotDamagedError:
    return SlotDamagedError(f"{name_of(ref)} is damaged: {part} does not match its checksum")


def _is_of(header: Header, ref: SlotRef) -> bool:
    return (header.generation, header.rank, header.step) == (ref.generation, ref.rank, ref.step)
