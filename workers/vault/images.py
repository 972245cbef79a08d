"""Readers of slot images, local or remote, and the training state read through them."""

from __future__ import annotations

import json
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
from xxhash import xxh3_64_intdigest

from rayzero.engine.errors import DataError
from rayzero.engine.layout.state_index import BlockIndex, StateSource
from rayzero.workers.vault.mappings import SlotMapping
from rayzero.workers.vault.records import SlotDamagedError, SlotGoneError, SlotRef
from rayzero.workers.vault.slots import (
    HEADER_BYTES,
    PAGE_BYTES,
    SlotHeader,
    checksum_of,
    read_header,
)

FETCH_CHUNK_BYTES = 16 * 2**20
"""The largest read from another node."""
VERIFY_THREADS = 4
"""Threads that verify a large image, because one core cannot use the memory's full bandwidth."""
VERIFY_S_PER_BYTE = 1e-8
"""Addition to the time limit of a read for verification, which usually runs at several GB/s, but
for all readers together."""

FetchRemote: TypeAlias = Callable[[SlotRef, int, int], memoryview]
"""(version, offset, length) -> bytes of an image on another node: at most `FETCH_CHUNK_BYTES`, and
fewer than `length` at the image's end. The other node first verifies the data for a read at offset
0 of more than the header; `length` is then the size of the image, which sets the time limit."""


def require_version(header: SlotHeader | None, ref: SlotRef) -> SlotHeader:
    """Returns the header. Raises SlotGoneError unless it is that of the complete version `ref`."""
    if header is None or not header.holds(ref):
        raise SlotGoneError.of(ref)
    return header


class SlotReader(ABC):
    """Reads the image of one complete version. Offsets count from the start of the header. Raises
    SlotGoneError if the header is not that of the version."""

    def __init__(self, ref: SlotRef, header: SlotHeader | None) -> None:
        self.ref = ref
        self.header = require_version(header, ref)

    @abstractmethod
    def read(self, offset: int, into: memoryview) -> None:
        """Fills `into` from byte `offset`. Raises SlotGoneError if the version no longer exists."""

    @abstractmethod
    def verify(self) -> None:
        """Compares the data with its writer's checksum, if there is one. Raises SlotDamagedError if
        they differ."""

    @abstractmethod
    def close(self) -> None:
        """Releases the memory. Idempotent."""

    def index(self) -> BlockIndex:
        """Returns the layout of the data."""
        header = self.header
        text = self._read_json(PAGE_BYTES, header.index_bytes, header.index_checksum, "its index")
        return BlockIndex.from_json(text)

    def metadata(self) -> dict[str, Any]:
        """Returns the state's JSON metadata."""
        header, start = self.header, self.header.metadata_offset
        return self._read_json(
            start, header.metadata_bytes, header.metadata_checksum, "its metadata"
        )

    def _read_json(self, offset: int, length: int, checksum: int, part: str) -> dict[str, Any]:
        text = bytearray(length)
        self.read(offset, memoryview(text))
        if xxh3_64_intdigest(text) != checksum:
            raise self._damaged(part)
        document: dict[str, Any] = json.loads(text)
        return document

    def _damaged(self, part: str) -> SlotDamagedError:
        return SlotDamagedError(
            f"{self.ref.describe()} is damaged: {part} does not match its checksum"
        )


class MappedSlotReader(SlotReader):
    """A version in this node's shared memory.

    Args:
        fd: the version's buffer; the caller may close it afterwards.
        header: for a replica whose header is not written yet; None: the header in the buffer.
        mapping: the buffer's mapping, if it is registered with the device.
        prefix: the buffer ends behind the weights and buffers.
    """

    def __init__(
        self,
        ref: SlotRef,
        fd: int,
        header: SlotHeader | None = None,
        mapping: SlotMapping | None = None,
        *,
        prefix: bool = False,
    ) -> None:
        super().__init__(ref, header or read_header(fd))
        self.registered = mapping is not None
        self._parts = self.header.parts()[: 2 if prefix else None]
        if mapping is None:
            nbytes = self.header.prefix_bytes if prefix else self.header.nbytes
            self._map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        else:
            self._map = mapping.memory
        self._bytes = memoryview(self._map)

    @property
    def data(self) -> memoryview:
        """The state's bytes, read-only."""
        start = self.header.data_offset
        return self._bytes[start : start + self.header.data_bytes]

    def read(self, offset: int, into: memoryview) -> None:
        copy_bytes(into, self._bytes[offset : offset + len(into)])

    def verify(self) -> None:
        for span, expected in self._parts:
            if checksum_of(self.data[span], VERIFY_THREADS) != expected:
                raise self._damaged("its data")

    def close(self) -> None:
        self._bytes.release()
        if not self.registered:
            # A view of `data` that is still in use keeps the memory mapped.
            with suppress(BufferError):
                self._map.close()


class RemoteSlotReader(SlotReader):
    """A version on another node, read in chunks.

    Reads are mostly sequential, so most of them are served from the current chunk.
    """

    def __init__(self, ref: SlotRef, fetch: FetchRemote) -> None:
        self._fetch = fetch
        super().__init__(ref, SlotHeader.decode(bytes(fetch(ref, 0, HEADER_BYTES))))
        self._start, self._window = 0, fetch(ref, 0, self.header.nbytes)

    def read(self, offset: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            skip = offset + done - self._start
            if not 0 <= skip < len(self._window):
                self._start, skip = offset + done, 0
                self._window = self._fetch(self.ref, self._start, FETCH_CHUNK_BYTES)
                if not self._window:
                    raise SlotGoneError(f"{self.ref.describe()} ends at byte {self._start}")
            part = self._window[skip : skip + len(into) - done]
            copy_bytes(into[done : done + len(part)], part)
            done += len(part)

    def verify(self) -> None:
        """No operation: the vault that holds the version verified it before the first chunk."""

    def close(self) -> None:
        self._window = memoryview(b"")


def copy_bytes(into: memoryview, source: memoryview) -> None:
    """Copies without holding the GIL, unlike slice assignment. Both have the same length."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


class VaultSource(StateSource):
    """The training state in the images of one step. Owns them until `close`. Used by one thread.

    Indexes and metadata are verified at construction; an image's data is verified before its first
    read, so that a rank that reads nothing from a slot does not touch the slot's data. Raises
    DataError if a slot is gone or damaged.
    """

    def __init__(self, step: int, images: Sequence[SlotReader]) -> None:
        if not images:
            raise DataError(f"no vault slot holds the state of step {step}")
        self.step = step
        self.block_indexes = [image.index() for image in images]
        self._images = images
        self._metadata_by_rank = {image.ref.rank: image.metadata() for image in images}
        self._unverified = set(range(len(images)))

    def metadata(self, rank: int) -> dict[str, Any]:
        ranks = self._metadata_by_rank
        return ranks[rank if rank in ranks else min(ranks)]

    def read(self, block: int, offset: int, into: memoryview) -> None:
        image = self._images[block]
        self.verify(block)
        end = image.header.data_bytes
        if not 0 <= offset <= end - len(into):
            raise DataError(
                f"bytes {offset} to {offset + len(into)} of a vault slot", f"0 to {end}"
            )
        image.read(image.header.data_offset + offset, into)

    def registered_block(self, block: int) -> memoryview | None:
        image = self._images[block]
        return image.data if isinstance(image, MappedSlotReader) and image.registered else None

    def verify(self, block: int) -> None:
        """Raises SlotDamagedError if the block is damaged."""
        if block in self._unverified:
            self._images[block].verify()
            self._unverified.remove(block)

    def close(self) -> None:
        for image in self._images:
            image.close()
