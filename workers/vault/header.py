"""The first page of a buffer: what is in it, and whether that is whole.

An *image* is all bytes of a buffer: this page, the state's table as JSON, room for the state's
small JSON part, and the data, each on pages of its own. It describes itself, so a copy of an image
is a replica, and whoever holds it can read it without asking its writer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct

from xxhash import xxh3_64_intdigest

from rayzero.workers.vault.errors import SlotDamagedError

PAGE_BYTES = 4096
PIN_AT = PAGE_BYTES // 2
"""Where the pin lies: one byte of its own, because the writer sets it and the vault clears it."""

_MAGIC = b"RZ slot\0"
_FORMAT = 1
_HAS_CHECKSUM = 1
_FIELDS = Struct("<8sIIIIIIqqQQQQQQQ")
_CHECKSUM = Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


class Status(IntEnum):
    """How far the writer of a buffer is."""

    EMPTY = 0
    WRITING = 1
    COMPLETE = 2


@dataclass(frozen=True)
class Geometry:
    """How many bytes each part of an image takes."""

    table_bytes: int
    room_bytes: int
    data_bytes: int

    @property
    def table_at(self) -> int:
        return PAGE_BYTES

    @property
    def small_at(self) -> int:
        return self.table_at + _whole_pages(self.table_bytes)

    @property
    def data_at(self) -> int:
        return self.small_at + _whole_pages(self.room_bytes)

    @property
    def nbytes(self) -> int:
        return self.data_at + _whole_pages(self.data_bytes)


@dataclass(frozen=True)
class Header:
    """What the first page says.

    Attributes:
        step: finished steps in the state; -1 while there is none.
        table_checksum, small_checksum, data_checksum: xxh3-64; the data's is None if it was not
            taken.
    """

    generation: int
    rank: int
    world_size: int
    geometry: Geometry
    status: Status = Status.EMPTY
    step: int = -1
    table_checksum: int = 0
    small_bytes: int = 0
    small_checksum: int = 0
    data_checksum: int | None = None

    def encode(self) -> bytes:
        """`HEADER_BYTES` bytes, the last of them a checksum of the others."""
        raw = _FIELDS.pack(
            _MAGIC,
            _FORMAT,
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
        return raw + _CHECKSUM.pack(xxh3_64_intdigest(raw))

    @classmethod
    def decode(cls, raw: bytes) -> Header | None:
        """The header in these bytes; None when they are torn, or no header.

        Raises:
            SlotDamagedError: it is a header of another format.
        """
        fields, checksum = raw[: _FIELDS.size], raw[_FIELDS.size : HEADER_BYTES]
        if len(raw) < HEADER_BYTES or not fields.startswith(_MAGIC):
            return None
        if _CHECKSUM.unpack(checksum)[0] != xxh3_64_intdigest(fields):
            return None
        _, written, status, flags, rank, world_size, _, generation, step, *sizes = _FIELDS.unpack(
            fields
        )
        if written != _FORMAT:
            raise SlotDamagedError(
                f"a slot of format {written}", f"format {_FORMAT}", "one version on all nodes"
            )
        table_bytes, table_checksum, room_bytes, small_bytes, small_checksum, data_bytes, data = (
            sizes
        )
        return cls(
            generation,
            rank,
            world_size,
            Geometry(table_bytes, room_bytes, data_bytes),
            Status(status),
            step,
            table_checksum,
            small_bytes,
            small_checksum,
            data if flags & _HAS_CHECKSUM else None,
        )


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
