"""Readers of slot images, local or remote, and the training state read through them."""

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
"""The largest read from another node."""

FetchRemote: TypeAlias = Callable[[SlotRef, int, int], memoryview]
"""(version, offset, length) -> bytes of an image on another node; fewer at the image's end."""


def describe_slot(ref: SlotRef) -> str:
    """A version as text, for error messages."""
    return (
        f"the slot of generation {ref.generation}, rank {ref.rank}, step {ref.step} "
        f"on node {ref.node_id}"
    )


class SlotReader(Protocol):
    """Reads the image of one complete version. Offsets count from the start of the header."""

    @property
    def ref(self) -> SlotRef: ...

    @property
    def header(self) -> SlotHeader: ...

    def read(self, offset: int, into: memoryview) -> None:
        """Fills `into` from byte `offset`.

        Raises:
            SlotGoneError: the version no longer exists.
        """

    def verify(self) -> None:
        """Compares the data with its writer's checksum, if there is one.

        Raises:
            SlotDamagedError: they differ.
        """

    def close(self) -> None:
        """Releases the memory. Idempotent."""


class MappedSlotReader:
    """A version in this node's shared memory.

    Args:
        fd: its buffer; the caller may close it afterwards.
        header: the header of a replica whose own is not written yet; None: the buffer's.

    Raises:
        SlotGoneError: the buffer holds another version, or none.
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
        expected = self._header.data_checksum
        if expected is not None and xxh3_64_intdigest(self.data) != expected:
            raise _damaged_error(self._ref, "its data")

    def close(self) -> None:
        self._bytes.release()
        # A view of `data` that is still in use keeps the memory mapped.
        with suppress(BufferError):
            self._map.close()


class RemoteSlotReader:
    """A version on another node, read through a buffer of one chunk.

    Reads are mostly sequential, so most of them are served from the current chunk.
    """

    def __init__(self, ref: SlotRef, fetch: FetchRemote) -> None:
        self._ref = ref
        self._fetch = fetch
        self._start, self._window = 0, memoryview(b"")
        header = bytearray(HEADER_BYTES)
        self.read(0, memoryview(header))
        self._header = require_complete(SlotHeader.decode(bytes(header)), ref)

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
        """No operation: the vault that holds the version verified it when the header was read."""

    def close(self) -> None:
        self._window = memoryview(b"")


def require_complete(header: SlotHeader | None, ref: SlotRef) -> SlotHeader:
    """The header, checked to be that of a complete version `ref`.

    Raises:
        SlotGoneError: it is of another version, or of an incomplete one.
    """
    if header is None or header.status is not SlotStatus.COMPLETE or not _is_version(header, ref):
        raise SlotGoneError(
            f"{describe_slot(ref)} is gone: dropped, overwritten, or never finished"
        )
    return header


def read_table(image: SlotReader) -> BlockIndex:
    """The layout of the data."""
    geometry = image.header.geometry
    text = _read_checked(
        image, geometry.table_offset, geometry.table_bytes, image.header.table_checksum, "its table"
    )
    return BlockIndex.from_json(json.loads(text))


def read_metadata(image: SlotReader) -> dict[str, Any]:
    """The state's JSON metadata."""
    header = image.header
    offset = header.geometry.metadata_offset
    text = _read_checked(
        image, offset, header.metadata_bytes, header.metadata_checksum, "its metadata"
    )
    metadata: dict[str, Any] = json.loads(text)
    return metadata


def copy_bytes(into: memoryview, source: memoryview) -> None:
    """Copies without holding the GIL, unlike slice assignment. Both have the same length."""
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
    """A `StateSource` over the images of one step. Owns them until `close`. Used by one thread.

    Tables and metadata are verified at construction, an image's data before its first read: a rank
    that reads nothing from a slot does not touch its data.

    Raises:
        DataError: a slot is gone or damaged.
    """

    def __init__(self, step: int, images: Sequence[SlotReader], verify: bool = True) -> None:
        if not images:
            raise DataError(f"no vault slot holds the state of step {step}")
        self._step = step
        self._images = images
        self._tables = [read_table(image) for image in images]
        self._metadata_by_rank = {image.ref.rank: read_metadata(image) for image in images}
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
            raise DataError(
                f"bytes {offset} to {offset + len(into)} of a vault slot", f"0 to {end}"
            )
        image.read(image.header.geometry.data_offset + offset, into)

    def close(self) -> None:
        for image in self._images:
            image.close()
