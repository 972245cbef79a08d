"""A buffer as its writer sees it: shared memory that is whole, or says that it is not.

The order in `begin` and `commit` is what makes a kill harmless. The header says *writing* before
the first byte changes and *complete* after the last one did, and has a checksum of its own, so half
a header is none. A writer that is killed anywhere between leaves a buffer that is not whole, and
did not touch the rank's other buffers.
"""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import replace

from xxhash import xxh3_64_intdigest

from rayzero.engine.errors import EngineError
from rayzero.engine.state.table import Table
from rayzero.workers.vault.errors import SlotGoneError, SlotRoomError
from rayzero.workers.vault.header import HEADER_BYTES, PIN_AT, Geometry, Header, Status

SMALL_BYTES = 256 * 1024
"""Room for the JSON part, fixed when a buffer is reserved."""


def read_header(fd: int) -> Header | None:
    """What the buffer says of itself just now; None when that is torn."""
    return Header.decode(os.pread(fd, HEADER_BYTES, 0))


def write_header(fd: int, header: Header) -> None:
    os.pwrite(fd, header.encode(), 0)


def read_pin(fd: int) -> bool:
    return os.pread(fd, 1, PIN_AT) == b"\1"


def write_pin(fd: int, pinned: bool) -> None:
    os.pwrite(fd, b"\1" if pinned else b"\0", PIN_AT)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """One write may take less than all of it."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def encode_table(table: Table) -> bytes:
    return json.dumps(table.to_json(), separators=(",", ":")).encode()


def geometry_of(table: Table, table_json: bytes) -> Geometry:
    """The image of a state with that table, with room for `SMALL_BYTES` of JSON."""
    return Geometry(len(table_json), SMALL_BYTES, table.nbytes)


class SlotBuffer:
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
        self._map[geometry.table_at : geometry.table_at + len(table_json)] = table_json
        self._header = replace(header, table_checksum=xxh3_64_intdigest(table_json))
        with memoryview(self._map) as whole:
            self._data = whole[geometry.data_at : geometry.data_at + geometry.data_bytes]

    @property
    def data(self) -> memoryview:
        """The state's bytes, writable. To be changed between `begin` and `commit` only."""
        return self._data

    @property
    def step(self) -> int:
        """Finished steps in the state that is in here; -1 when none is whole."""
        return self._header.step if self._header.status is Status.COMPLETE else -1

    @property
    def pinned(self) -> bool:
        """Whether the version in here must not be overwritten yet. The vault lets go of it."""
        return self.step >= 0 and self._map[PIN_AT] == 1

    def begin(self) -> None:
        """Gives up the version that is in here; `data` may change from now on.

        Raises:
            EngineError: that version is pinned.
        """
        if self.pinned:
            raise EngineError(f"the copy of step {self.step} is pinned and cannot be overwritten")
        self._say(replace(self._header, status=Status.WRITING, step=-1))

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
        if self._header.status is not Status.WRITING:
            raise EngineError("a slot's version is committed without having been begun")
        geometry = self._header.geometry
        if len(small) > geometry.room_bytes:
            raise SlotRoomError(
                f"the JSON part of the state takes {len(small):,} bytes",
                f"up to {geometry.room_bytes:,}",
                "keep less in what the job adds to the state",
            )
        self._map[geometry.small_at : geometry.small_at + len(small)] = small
        self._map[PIN_AT] = int(pin)  # before the header: nobody sees the version without its pin
        self._say(
            replace(
                self._header,
                status=Status.COMPLETE,
                step=step,
                small_bytes=len(small),
                small_checksum=xxh3_64_intdigest(small),
                data_checksum=checksum,
            )
        )

    def unpin(self) -> None:
        self._map[PIN_AT] = 0

    def _say(self, header: Header) -> None:
        self._header = header
        self._map[:HEADER_BYTES] = header.encode()
