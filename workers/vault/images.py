"""Slot reader, VaultSource.

Reading an image: mapped from shared memory, or fetched piece by piece from another node.

A whole training state read from slots, as a new engine begins from it.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

import numpy as np
from xxhash import xxh3_64_intdigest

from rayzero.engine.errors import DataError
from rayzero.engine.layout.state_index import BlockIndex
from rayzero.workers.vault.records import SlotDamagedError, SlotGoneError, SlotRef
from rayzero.workers.vault.slots import HEADER_BYTES, SlotHeader, SlotStatus, read_header

FETCH_CHUNK_BYTES = 16 * 2**20
"""How much of an image crosses nodes at once."""

FetchRemote: TypeAlias = Callable[[SlotRef, int, int], memoryview]
"""(version, offset, length) -> those bytes of an image on another node; fewer where it ends."""


def describe_slot(ref: SlotRef) -> str:
    """A version's name in messages."""
    return (
        f"the slot of generation {ref.generation}, rank {ref.rank}, step {ref.step} "
        f"on node {ref.node_id}"
    )


class SlotReader(Protocol):
    """The bytes of one whole version, counted from its header's first byte."""

    @property
    def ref(self) -> SlotRef: ...

    @property
    def header(self) -> SlotHeader: ...

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


class MappedSlotReader:
    """A version in this node's shared memory.

    Args:
        fd: its buffer; it may be closed afterwards.
        header: what the buffer is going to say of itself; None: what it says.

    Raises:
        SlotGoneError: another version is in the buffer, or none.
    """

    def __init__(self, ref: SlotRef, fd: int, header: SlotHeader | None = None) -> None:
        self._ref = ref
        self._header = header = require_complete(header or read_header(fd), ref)
        self._map = mmap.mmap(fd, header.geometry.nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        self._bytes = memoryview(self._map)

    @property
    def ref(self) -> SlotRef:
        return self._ref

    @property
    def header(self) -> SlotHeader:
        return self._header

    @property
    def data(self) -> memoryview:
        """The state's bytes, read-only."""
        geometry = self._header.geometry
        return self._bytes[geometry.data_offset : geometry.data_offset + geometry.data_bytes]

    def read(self, offset: int, into: memoryview) -> None:
        copy_bytes(into, self._bytes[offset : offset + len(into)])

    def verify(self) -> None:
        wanted = self._header.data_checksum
        if wanted is not None and xxh3_64_intdigest(self.data) != wanted:
            raise _damaged_error(self._ref, "its data")

    def close(self) -> None:
        self._bytes.release()
        # What somebody's view of `data` still uses stays mapped until that view is gone.
        with suppress(BufferError):
            self._map.close()


class RemoteSlotReader:
    """A version on another node, read through a window of one chunk.

    Reads come in rising order mostly, so most are answered from the chunk at hand.
    """

    def __init__(self, ref: SlotRef, fetch: FetchRemote) -> None:
        self._ref = ref
        self._fetch = fetch
        self._start, self._window = 0, memoryview(b"")
        first = bytearray(HEADER_BYTES)
        self.read(0, memoryview(first))
        self._header = require_complete(SlotHeader.decode(bytes(first)), ref)

    @property
    def ref(self) -> SlotRef:
        return self._ref

    @property
    def header(self) -> SlotHeader:
        return self._header

    def read(self, offset: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            skip = offset + done - self._start
            if not 0 <= skip < len(self._window):
                self._start, skip = offset + done, 0
                self._window = self._fetch(self._ref, self._start, FETCH_CHUNK_BYTES)
                if not self._window:
                    raise SlotGoneError(f"{describe_slot(self._ref)} ends at byte {self._start}")
            part = self._window[skip : skip + len(into) - done]
            copy_bytes(into[done : done + len(part)], part)
            done += len(part)

    def verify(self) -> None:
        """Nothing: its vault compared the checksum before it gave away the first byte."""

    def close(self) -> None:
        self._window = memoryview(b"")


def require_complete(header: SlotHeader | None, ref: SlotRef) -> SlotHeader:
    """That header, if it is of that version, and the version is whole.

    Raises:
        SlotGoneError: it is not.
    """
    if header is None or header.status is not SlotStatus.COMPLETE or not _is_version(header, ref):
        raise SlotGoneError(
            f"{describe_slot(ref)} is gone: dropped, overwritten, or never finished"
        )
    return header


def read_table(image: SlotReader) -> BlockIndex:
    """What lies where in the data."""
    geometry = image.header.geometry
    text = _read_checked(
        image, geometry.table_offset, geometry.table_bytes, image.header.table_checksum, "its table"
    )
    return BlockIndex.from_json(json.loads(text))


def read_metadata(image: SlotReader) -> dict[str, Any]:
    """The state's JSON part."""
    header = image.header
    small: dict[str, Any] = json.loads(
        _read_checked(
            image,
            header.geometry.metadata_offset,
            header.small_bytes,
            header.small_checksum,
            "its JSON part",
        )
    )
    return small


def copy_bytes(into: memoryview, source: memoryview) -> None:
    """Copies bytes of the same number, without holding up other threads as a slice would."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


def _read_checked(image: SlotReader, offset: int, length: int, checksum: int, part: str) -> bytes:
    text = bytearray(length)
    image.read(offset, memoryview(text))
    if xxh3_64_intdigest(text) != checksum:
        raise _damaged_error(image.ref, part)
    return bytes(text)


def _damaged_error(ref: SlotRef, part: str) -> SlotDamagedError:
    return SlotDamagedError(f"{describe_slot(ref)} is damaged: {part} does not match its checksum")


def _is_version(header: SlotHeader, ref: SlotRef) -> bool:
    return (header.generation, header.rank, header.step) == (ref.generation, ref.rank, ref.step)


class VaultSource:
    """A `StateSource` over the images of one step. Owns them until `close`. For one thread.

    What describes the data is checked at once, the data itself before it is first read: a rank that
    needs nothing of a slot does not touch it.

    Raises:
        DataError: a slot is gone or damaged.
    """

    def __init__(self, step: int, images: Sequence[SlotReader], verify: bool = True) -> None:
        if not images:
            raise DataError(f"the state of step {step} has no slot to be read from")
        self._step = step
        self._images = images
        self._tables = [read_table(one) for one in images]
        self._metadata_by_rank = {one.ref.rank: read_metadata(one) for one in images}
        self._unverified = set(range(len(images))) if verify else set()

    @property
    def step(self) -> int:
        return self._step

    @property
    def block_indexes(self) -> Sequence[BlockIndex]:
        return self._tables

    def metadata(self, rank: int) -> dict[str, Any]:
        return self._metadata_by_rank[
            rank if rank in self._metadata_by_rank else min(self._metadata_by_rank)
        ]

    def read(self, block: int, offset: int, into: memoryview) -> None:
        image = self._images[block]
        if block in self._unverified:
            image.verify()
            self._unverified.remove(block)
        end = image.header.geometry.data_bytes
        if not 0 <= offset <= end - len(into):
            raise DataError(f"bytes {offset} to {offset + len(into)} of a slot", f"0 to {end}")
        image.read(image.header.geometry.data_offset + offset, into)

    def close(self) -> None:
        for one in self._images:
            one.close()
