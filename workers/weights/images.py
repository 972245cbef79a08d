"""A version's slots in this node's memory, read while their writers may overwrite them.

Readers do not lock a slot. A reader reads the header, then the data, then the header again. If the
header is unchanged, all data that it read belongs to the version, because a writer invalidates the
header first. Checksums are computed while the bytes are copied, a piece at a time, so that memory
is read once. If any byte of a part of a slot was read, the checksum of the whole part is verified.

Rule of ordering: `versions-whole` (docs/engine.md).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any

from xxhash import xxh3_64

from rayzero.engine.errors import DataError
from rayzero.engine.layout.state_index import BlockIndex, StateSource
from rayzero.workers.vault import slots
from rayzero.workers.vault.images import SlotReader, copy_bytes
from rayzero.workers.vault.records import SlotGoneError, SlotRef
from rayzero.workers.vault.slots import HEADER_BYTES, SlotHeader, combine_checksums, read_header

PIECE_BYTES = 256 * 1024
"""Size of a piece, which is copied, and then hashed while it is in the processor's cache."""
KEPT_TURNS = 4
"""Number of versions for which an unused mapping is kept: slots are written in turns, and mapping a
slot costs about as much as copying it."""


class SlotMappings:
    """The beginnings of this node's slots, mapped read-only. Unused mappings are dropped, because a
    mapping keeps memory that the vault has freed. Used by one thread."""

    def __init__(self) -> None:
        self._memory: dict[tuple[int, int], mmap.mmap] = {}
        self._used: dict[tuple[int, int], int] = {}
        self._turn = 0

    def map(self, ref: SlotRef, fd: int) -> WeightImage:
        """Returns the image in a buffer; the caller may close `fd`. Raises SlotGoneError if the
        buffer does not hold that version, or no longer does."""
        header = read_header(fd)
        if header is None or not header.holds(ref):
            raise SlotGoneError.of(ref)
        status = os.fstat(fd)
        key = status.st_dev, status.st_ino
        memory = self._memory.get(key)
        if memory is None or len(memory) < header.prefix_bytes:
            memory = mmap.mmap(fd, header.prefix_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
            self._memory[key] = memory
        self._used[key] = self._turn
        return WeightImage(ref, header, memory)

    def end_turn(self) -> None:
        """Ends the read of a version. Drops mappings that none of the last versions needed."""
        self._turn += 1
        for key in [key for key, turn in self._used.items() if turn + KEPT_TURNS < self._turn]:
            del self._memory[key], self._used[key]


class WeightImage(SlotReader):
    """The beginning of a version's image: up to the end of the weights and buffers."""

    def __init__(self, ref: SlotRef, header: SlotHeader, memory: mmap.mmap) -> None:
        super().__init__(ref, header)
        self._bytes = memoryview(memory)
        start = header.data_offset
        data = self._bytes[start : start + header.weight_bytes]
        size = header.constant_bytes
        constants_checksum = weights_checksum = None
        if header.checksums is not None:
            constants_checksum = header.constants_checksum
            weights_checksum = header.checksums.weights
        self._parts = (_Part(data[:size], constants_checksum), _Part(data[size:], weights_checksum))

    def read(self, offset: int, into: memoryview) -> None:
        copy_bytes(into, self._bytes[offset : offset + len(into)])

    def read_data(self, offset: int, into: memoryview) -> None:
        """Fills `into` from byte `offset` of the data. Use the bytes only after `verify`. Reads are
        fast in the order of the offsets. Raises DataError if these bytes are no weights."""
        size = self.header.constant_bytes
        number = int(offset >= size)
        if not self._parts[number].read(offset - number * size, into):
            raise DataError(
                f"bytes {offset} to {offset + len(into)} of {self.ref.describe()}",
                f"0 to {size}, and from there to {self.header.weight_bytes}: the weights",
            )

    def verify(self) -> None:
        """Raises SlotGoneError if the slot was overwritten since the header was read; otherwise
        SlotDamagedError if a part that was read does not match its checksum."""
        matches = [part.matches() for part in self._parts]
        if bytes(self._bytes[:HEADER_BYTES]) != self.header.encode():
            raise SlotGoneError.of(self.ref)
        if not all(matches):
            raise self._damaged("its weights")

    def close(self) -> None:
        """No operation: the mapping is kept for the next version in this slot."""


class _Part:
    """A part of a slot's data with a checksum of its own, hashed as it is read."""

    def __init__(self, data: memoryview, checksum: int | None) -> None:
        self._data = data
        self._checksum = checksum
        self._is_read = False
        self._hashed = 0
        self._hasher = xxh3_64()
        self._chunks: list[int] = []

    def read(self, offset: int, into: memoryview) -> bool:
        """Fills `into` from byte `offset`. Returns False if not all bytes are in the part."""
        end = offset + len(into)
        if not 0 <= offset <= end <= len(self._data):
            return False
        self._is_read = self._is_read or end > offset
        self._hash_to(offset)
        for start in range(offset, end, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, end)
            copy_bytes(into[start - offset : stop - offset], self._data[start:stop])
            self._hash_to(stop)
        return True

    def matches(self) -> bool:
        """Returns whether the part matches its checksum. Also True if nothing of the part was read,
        or it has no checksum."""
        if not self._is_read or self._checksum is None:
            return True
        self._hash_to(len(self._data))
        if self._hashed % slots.CHUNK_BYTES or not self._chunks:
            self._chunks.append(self._hasher.intdigest())
        return combine_checksums(self._chunks) == self._checksum

    def _hash_to(self, stop: int) -> None:
        """Continues the computation of the part's `slots.checksum_of` up to byte `stop`."""
        while self._checksum is not None and self._hashed < stop:
            left = slots.CHUNK_BYTES - self._hashed % slots.CHUNK_BYTES
            end = min(self._hashed + min(left, PIECE_BYTES), stop)
            self._hasher.update(self._data[self._hashed : end])
            self._hashed = end
            if end % slots.CHUNK_BYTES == 0:
                self._chunks.append(self._hasher.intdigest())
                self._hasher = xxh3_64()


class WeightSource(StateSource):
    """The weights and buffers of one version. `SlotMappings` owns the mappings of its images.

    Args:
        indexes: the indexes of earlier images, by checksum. Those of `images` are added.
    """

    def __init__(self, images: Sequence[WeightImage], indexes: dict[int, BlockIndex]) -> None:
        self.step = images[0].ref.step
        for image in images:
            if image.header.index_checksum not in indexes:
                indexes[image.header.index_checksum] = image.index()
        self.block_indexes = [indexes[image.header.index_checksum] for image in images]
        self._images = images
        self._document = min(images, key=lambda image: image.ref.rank).metadata()

    def metadata(self, rank: int) -> dict[str, Any]:
        """Returns the metadata of the lowest rank, which alone describes the model."""
        del rank
        return self._document

    def read(self, block: int, offset: int, into: memoryview) -> None:
        self._images[block].read_data(offset, into)

    def verify_all(self) -> None:
        """Raises SlotGoneError or SlotDamagedError unless all data read belongs to the version."""
        for image in self._images:
            image.verify()

    def constants(self) -> tuple[object, ...] | None:
        """Returns a value that is equal for versions with the same constants at the same offsets;
        None if the checksums are not known."""
        headers = [image.header for image in self._images]
        if any(header.checksums is None for header in headers):
            return None
        return tuple(
            (header.rank, header.index_checksum, header.constants_checksum) for header in headers
        )
