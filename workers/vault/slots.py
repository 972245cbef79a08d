"""Slot header and writer.

The first page of a buffer: what is in it, and whether that is whole.

An *image* is all bytes of a buffer: this page, the state's table as JSON, room for the state's
small JSON part, and the data, each on pages of its own. It describes itself, so a copy of an image
is a replica, and whoever holds it can read it without asking its writer.

A buffer as its writer sees it: shared memory that is whole, or says that it is not.

The order in `begin` and `commit` is what makes a kill harmless. The header says *writing* before
the first byte changes and *complete* after the last one did, and has a checksum of its own, so half
a header is none. A writer that is killed anywhere between leaves a buffer that is not whole, and
did not touch the rank's other buffers.
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
"""Where the pin lies: one byte of its own, because the writer sets it and the vault clears it."""

_MAGIC = b"RZ slot\0"


_FORMAT_VERSION = 1


_HAS_CHECKSUM = 1


_HEADER_STRUCT = Struct("<8sIIIIIIqqQQQQQQQ")


_CHECKSUM_STRUCT = Struct("<Q")


HEADER_BYTES = _HEADER_STRUCT.size + _CHECKSUM_STRUCT.size


class SlotStatus(IntEnum):
    """How far the writer of a buffer is."""

    EMPTY = 0
    WRITING = 1
    COMPLETE = 2


@dataclass(frozen=True)
class SlotGeometry:
    """How many bytes each part of an image takes."""

    table_bytes: int
    room_bytes: int
    data_bytes: int

    @property
    def table_offset(self) -> int:
        return PAGE_BYTES

    @property
    def metadata_offset(self) -> int:
        return self.table_offset + _round_up_to_pages(self.table_bytes)

    @property
    def data_offset(self) -> int:
        return self.metadata_offset + _round_up_to_pages(self.room_bytes)

    @property
    def nbytes(self) -> int:
        return self.data_offset + _round_up_to_pages(self.data_bytes)


@dataclass(frozen=True)
class SlotHeader:
    """What the first page says.

    Attributes:
        step: finished steps in the state; -1 while there is none.
        table_checksum, small_checksum, data_checksum: xxh3-64; the data's is None if it was not
            taken.
    """

    generation: int
    rank: int
    world_size: int
    geometry: SlotGeometry
    status: SlotStatus = SlotStatus.EMPTY
    step: int = -1
    table_checksum: int = 0
    small_bytes: int = 0
    small_checksum: int = 0
    data_checksum: int | None = None

    def encode(self) -> bytes:
        """`HEADER_BYTES` bytes, the last of them a checksum of the others."""
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
            self.geometry.room_bytes,
            self.small_bytes,
            self.small_checksum,
            self.geometry.data_bytes,
            self.data_checksum or 0,
        )
        return raw + _CHECKSUM_STRUCT.pack(xxh3_64_intdigest(raw))

    @classmethod
    def decode(cls, raw: bytes) -> SlotHeader | None:
        """The header in these bytes; None when they are torn, or no header.

        Raises:
            SlotDamagedError: it is a header of another format.
        """
        fields, checksum = raw[: _HEADER_STRUCT.size], raw[_HEADER_STRUCT.size : HEADER_BYTES]
        if len(raw) < HEADER_BYTES or not fields.startswith(_MAGIC):
            return None
        if _CHECKSUM_STRUCT.unpack(checksum)[0] != xxh3_64_intdigest(fields):
            return None
        _, written, status, flags, rank, world_size, _, generation, step, *sizes = (
            _HEADER_STRUCT.unpack(fields)
        )
        if written != _FORMAT_VERSION:
            raise SlotDamagedError(
                f"a slot of format {written}",
                f"format {_FORMAT_VERSION}",
                "one version on all nodes",
            )
        table_bytes, table_checksum, room_bytes, small_bytes, small_checksum, data_bytes, data = (
            sizes
        )
        return cls(
            generation,
            rank,
            world_size,
            SlotGeometry(table_bytes, room_bytes, data_bytes),
            SlotStatus(status),
            step,
            table_checksum,
            small_bytes,
            small_checksum,
            data if flags & _HAS_CHECKSUM else None,
        )


def _round_up_to_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


METADATA_ROOM_BYTES = 256 * 1024
"""Room for the JSON part, fixed when a buffer is reserved."""


def read_header(fd: int) -> SlotHeader | None:
    """What the buffer says of itself just now; None when that is torn."""
    return SlotHeader.decode(os.pread(fd, HEADER_BYTES, 0))


def write_header(fd: int, header: SlotHeader) -> None:
    os.pwrite(fd, header.encode(), 0)


def read_pin(fd: int) -> bool:
    return os.pread(fd, 1, PIN_OFFSET) == b"\1"


def write_pin(fd: int, pinned: bool) -> None:
    os.pwrite(fd, b"\1" if pinned else b"\0", PIN_OFFSET)


def write_fully(fd: int, data: memoryview, offset: int) -> None:
    """One write may take less than all of it."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def encode_table(table: BlockIndex) -> bytes:
    return json.dumps(table.to_json(), separators=(",", ":")).encode()


def slot_geometry(table: BlockIndex, table_json: bytes) -> SlotGeometry:
    """The image of a state with that table, with room for `SMALL_BYTES` of JSON."""
    return SlotGeometry(len(table_json), METADATA_ROOM_BYTES, table.nbytes)


class SlotWriter:
    """One of a rank's buffers, mapped for writing as long as this object or a view of `data` lives.

    For one thread. The vault keeps what is in it afterwards.

    Args:
        fd: the buffer, as the vault reserved it; it may be closed afterwards.
        table_json: the table of the state that goes in here.
    """

    def __init__(self, fd: int, table_json: bytes) -> None:
        header = read_header(fd)
        if header is None:
            raise SlotGoneError("the vault handed out a buffer without a header")
        geometry = header.geometry
        # Populated, so that no step pays for a page's first touch.
        self._map = mmap.mmap(fd, geometry.nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._map[geometry.table_offset : geometry.table_offset + len(table_json)] = table_json
        self._header = replace(header, table_checksum=xxh3_64_intdigest(table_json))
        with memoryview(self._map) as whole:
            self._data = whole[geometry.data_offset : geometry.data_offset + geometry.data_bytes]

    @property
    def data(self) -> memoryview:
        """The state's bytes, writable. To be changed between `begin` and `commit` only."""
        return self._data

    @property
    def step(self) -> int:
        """Finished steps in the state that is in here; -1 when none is whole."""
        return self._header.step if self._header.status is SlotStatus.COMPLETE else -1

    @property
    def pinned(self) -> bool:
        """Whether the version in here must not be overwritten yet. The vault lets go of it."""
        return self.step >= 0 and self._map[PIN_OFFSET] == 1

    def begin(self) -> None:
        """Gives up the version that is in here; `data` may change from now on.

        Raises:
            EngineError: that version is pinned.
        """
        if self.pinned:
            raise EngineError(f"the copy of step {self.step} is pinned and cannot be overwritten")
        self._write_header(replace(self._header, status=SlotStatus.WRITING, step=-1))

    def commit(self, step: int, small: bytes, pin: bool, checksum: int | None) -> None:
        """Makes what is in `data` the whole version of a step.

        Args:
            small: the state's JSON part.
            pin: whether it must stay until the vault unpins it.
            checksum: xxh3-64 of `data`, if it was taken.

        Raises:
            SlotRoomError: `small` is too large; the buffer holds no version then.
            EngineError: `begin` was not called before.
        """
        if self._header.status is not SlotStatus.WRITING:
            raise EngineError("a slot's version is committed without having been begun")
        geometry = self._header.geometry
        if len(small) > geometry.room_bytes:
            raise SlotRoomError(
                f"the JSON part of the state takes {len(small):,} bytes",
                f"up to {geometry.room_bytes:,}",
                "keep less in what the job adds to the state",
            )
        self._map[geometry.metadata_offset : geometry.metadata_offset + len(small)] = small
        self._map[PIN_OFFSET] = int(
            pin
        )  # before the header: nobody sees the version without its pin
        self._write_header(
            replace(
                self._header,
                status=SlotStatus.COMPLETE,
                step=step,
                small_bytes=len(small),
                small_checksum=xxh3_64_intdigest(small),
                data_checksum=checksum,
            )
        )

    def unpin(self) -> None:
        self._map[PIN_OFFSET] = 0

    def _write_header(self, header: SlotHeader) -> None:
        self._header = header
        self._map[:HEADER_BYTES] = header.encode()
