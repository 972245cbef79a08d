"""Slot buffers: the header page, and the writer that keeps a buffer consistent.

An *image* is all bytes of a buffer: the header page, the state's table as JSON, space for the
state's JSON metadata, and the data, each part on pages of its own. An image describes itself: a
copy of it is a replica, and can be read without its writer.

The order of writes in `begin` and `commit` makes a kill at any point harmless. The header says
*writing* before the first byte of data changes and *complete* after the last one has, and carries
its own checksum, so that a half-written header is invalid. A writer killed in between leaves a
buffer without a complete version; the rank's other buffers are untouched.
"""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import dataclass, replace
from enum import IntEnum
from struct import Struct

from xxhash import xxh3_64_intdigest

from rayzero.engine.errors import EngineError
from rayzero.engine.layout.state_index import BlockIndex
from rayzero.workers.vault.records import SlotDamagedError, SlotGoneError, SlotRoomError

PAGE_BYTES = 4096

PIN_OFFSET = PAGE_BYTES // 2
"""Offset of the pin: a byte of its own, because the writer sets it and the vault clears it."""

METADATA_CAPACITY = 256 * 1024
"""Space for the JSON metadata in bytes, fixed when a buffer is reserved."""

_MAGIC = b"RZ slot\0"
_FORMAT_VERSION = 1
_HAS_CHECKSUM = 1
_HEADER_STRUCT = Struct("<8sIIIIIIqqQQQQQQQ")
_CHECKSUM_STRUCT = Struct("<Q")
HEADER_BYTES = _HEADER_STRUCT.size + _CHECKSUM_STRUCT.size


class SlotStatus(IntEnum):
    """State of a buffer's version."""

    EMPTY = 0
    WRITING = 1
    COMPLETE = 2


@dataclass(frozen=True)
class SlotGeometry:
    """Sizes of an image's parts in bytes."""

    table_bytes: int
    metadata_capacity: int
    data_bytes: int

    @property
    def table_offset(self) -> int:
        return PAGE_BYTES

    @property
    def metadata_offset(self) -> int:
        return self.table_offset + _round_up_to_pages(self.table_bytes)

    @property
    def data_offset(self) -> int:
        return self.metadata_offset + _round_up_to_pages(self.metadata_capacity)

    @property
    def nbytes(self) -> int:
        return self.data_offset + _round_up_to_pages(self.data_bytes)


@dataclass(frozen=True)
class SlotHeader:
    """The contents of the header page.

    Attributes:
        step: finished steps of the state; -1 if there is no complete version.
        table_checksum, metadata_checksum, data_checksum: xxh3-64; the data's is None if it was not
            computed.
    """

    generation: int
    rank: int
    world_size: int
    geometry: SlotGeometry
    status: SlotStatus = SlotStatus.EMPTY
    step: int = -1
    table_checksum: int = 0
    metadata_bytes: int = 0
    metadata_checksum: int = 0
    data_checksum: int | None = None

    def encode(self) -> bytes:
        """`HEADER_BYTES` bytes; the last 8 are a checksum of the rest."""
        raw = _HEADER_STRUCT.pack(
            _MAGIC,
            _FORMAT_VERSION,
            self.status,
            0 if self.data_checksum is None else _HAS_CHECKSUM,
            self.rank,
            self.world_size,
            0,
            self.generation,
            self.step,
            self.geometry.table_bytes,
            self.table_checksum,
            self.geometry.metadata_capacity,
            self.metadata_bytes,
            self.metadata_checksum,
            self.geometry.data_bytes,
            self.data_checksum or 0,
        )
        return raw + _CHECKSUM_STRUCT.pack(xxh3_64_intdigest(raw))

    @classmethod
    def decode(cls, raw: bytes) -> SlotHeader | None:
        """The header in these bytes; None if they are no valid header.

        Raises:
            SlotDamagedError: the header has another format version.
        """
        fields, checksum = raw[: _HEADER_STRUCT.size], raw[_HEADER_STRUCT.size : HEADER_BYTES]
        if len(raw) < HEADER_BYTES or not fields.startswith(_MAGIC):
            return None
        if _CHECKSUM_STRUCT.unpack(checksum)[0] != xxh3_64_intdigest(fields):
            return None
        _, version, status, flags, rank, world_size, _, generation, step, *sizes = (
            _HEADER_STRUCT.unpack(fields)
        )
        if version != _FORMAT_VERSION:
            raise SlotDamagedError(
                f"a vault slot of format version {version}",
                f"version {_FORMAT_VERSION}",
                "the same version of rayzero on all nodes",
            )
        (
            table_bytes,
            table_checksum,
            metadata_capacity,
            metadata_bytes,
            metadata_checksum,
            data_bytes,
            data,
        ) = sizes
        return cls(
            generation,
            rank,
            world_size,
            SlotGeometry(table_bytes, metadata_capacity, data_bytes),
            SlotStatus(status),
            step,
            table_checksum,
            metadata_bytes,
            metadata_checksum,
            data if flags & _HAS_CHECKSUM else None,
        )


def _round_up_to_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def read_header(fd: int) -> SlotHeader | None:
    """The buffer's current header; None if it is invalid, or being written."""
    return SlotHeader.decode(os.pread(fd, HEADER_BYTES, 0))


def write_header(fd: int, header: SlotHeader) -> None:
    os.pwrite(fd, header.encode(), 0)


def read_pin(fd: int) -> bool:
    return os.pread(fd, 1, PIN_OFFSET) == b"\1"


def write_pin(fd: int, pinned: bool) -> None:
    os.pwrite(fd, b"\1" if pinned else b"\0", PIN_OFFSET)


def write_fully(fd: int, data: memoryview, offset: int) -> None:
    """Writes all of `data`: a single `pwrite` may write less."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def encode_table(table: BlockIndex) -> bytes:
    return json.dumps(table.to_json(), separators=(",", ":")).encode()


def slot_geometry(table: BlockIndex, table_json: bytes) -> SlotGeometry:
    """Sizes of the image of a state with that table."""
    return SlotGeometry(len(table_json), METADATA_CAPACITY, table.nbytes)


class SlotWriter:
    """One of a rank's buffers. Used by one thread.

    The buffer is mapped for as long as this object or a view of `data` lives; its contents stay in
    the vault after that.

    Args:
        fd: a buffer reserved by the vault; the caller may close it afterwards.
        table_json: the table of the state to be written.
    """

    def __init__(self, fd: int, table_json: bytes) -> None:
        header = read_header(fd)
        if header is None:
            raise SlotGoneError("the vault returned a buffer without a valid header")
        geometry = header.geometry
        # Populated now, so that no training step pays for page faults.
        self._map = mmap.mmap(fd, geometry.nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._map[geometry.table_offset : geometry.table_offset + len(table_json)] = table_json
        self._header = replace(header, table_checksum=xxh3_64_intdigest(table_json))
        with memoryview(self._map) as image:
            self._data = image[geometry.data_offset : geometry.data_offset + geometry.data_bytes]

    @property
    def data(self) -> memoryview:
        """The state's bytes. May be changed between `begin` and `commit` only."""
        return self._data

    @property
    def step(self) -> int:
        """Finished steps of the stored state; -1 if there is no complete version."""
        return self._header.step if self._header.status is SlotStatus.COMPLETE else -1

    @property
    def pinned(self) -> bool:
        """Whether the stored version must not be overwritten yet. The vault clears the pin."""
        return self.step >= 0 and self._map[PIN_OFFSET] == 1

    def begin(self) -> None:
        """Invalidates the stored version; `data` may be changed after this.

        Raises:
            EngineError: the version is pinned.
        """
        if self.pinned:
            raise EngineError(
                f"the copy of step {self.step} in the vault is pinned and cannot be overwritten"
            )
        self._write_header(replace(self._header, status=SlotStatus.WRITING, step=-1))

    def commit(self, step: int, metadata: bytes, pin: bool, checksum: int | None) -> None:
        """Marks `data` as the complete version of a step.

        Args:
            metadata: the state's JSON metadata.
            pin: keep the version until the vault unpins it.
            checksum: xxh3-64 of `data`; None if it was not computed.

        Raises:
            SlotRoomError: `metadata` is too large; the buffer then holds no version.
            EngineError: `begin` was not called before.
        """
        if self._header.status is not SlotStatus.WRITING:
            raise EngineError("SlotWriter.commit without a SlotWriter.begin before it")
        geometry = self._header.geometry
        if len(metadata) > geometry.metadata_capacity:
            raise SlotRoomError(
                f"the state's metadata takes {len(metadata):,} bytes as JSON",
                f"up to {geometry.metadata_capacity:,}",
                "smaller values in the optimizer's param groups or in the LR scheduler's state",
            )
        self._map[geometry.metadata_offset : geometry.metadata_offset + len(metadata)] = metadata
        self._map[PIN_OFFSET] = int(pin)  # before the header: no reader sees the version unpinned
        self._write_header(
            replace(
                self._header,
                status=SlotStatus.COMPLETE,
                step=step,
                metadata_bytes=len(metadata),
                metadata_checksum=xxh3_64_intdigest(metadata),
                data_checksum=checksum,
            )
        )

    def _write_header(self, header: SlotHeader) -> None:
        self._header = header
        self._map[:HEADER_BYTES] = header.encode()
