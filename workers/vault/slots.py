"""Slot buffers: the header page, and the writer that keeps a buffer consistent.

An *image* is all bytes of a buffer: the header page, the state's index as JSON, space for the
state's JSON metadata, and the data, each part on pages of its own. An image describes itself: a
copy of it is a replica, and can be read without its writer.

The order of writes in `begin` and `commit` makes a kill at any point harmless. The header says that
there is no version before the first byte of data changes, and names the version after the last one
has. It carries its own checksum, so that a half-written header is invalid. A writer killed in
between leaves a buffer without a complete version; the rank's other buffers are untouched.

Rule of ordering: `slot-header` (docs/engine.md).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from rayzero.engine.errors import EngineError
from rayzero.engine.layout.state_index import BlockIndex
from rayzero.workers.vault.mappings import SlotMapping
from rayzero.workers.vault.records import SlotDamagedError, SlotGoneError, SlotRef, SlotRoomError

PAGE_BYTES = 4096

PIN_OFFSET = PAGE_BYTES // 2
"""Offset of the pin for a checkpoint: a byte of its own, because the writer sets it and the vault
clears it."""

COPY_OFFSET = PIN_OFFSET + 8
"""Offset of the pin for other nodes, an integer that has one writer at a time: the slot's writer
sets `_TO_COPY`, then its vault what `write_copied` does, then the slot's writer 0."""

METADATA_CAPACITY = 256 * 1024
"""Space for the JSON metadata in bytes."""

CHUNK_BYTES = 64 * 2**20
"""A checksum of data is that of the checksums of its chunks, so that threads can share it. Three
parts have one of their own: what training never changes, which comes first, is not hashed again;
the other weights and buffers, behind it, are read without the rest."""

_MAGIC = b"RZ slot\0"
_FORMAT_VERSION = 5
_HEADER_STRUCT = Struct("<8sIqIIQQQQqQQQQ?QQ")
_CHECKSUM_STRUCT = Struct("<Q")
_COPY_STRUCT = Struct("<Q")
_TO_COPY = 1
HEADER_BYTES = _HEADER_STRUCT.size + _CHECKSUM_STRUCT.size


class SlotChecksums(NamedTuple):
    """`checksum_of` the weights and buffers in a slot's data that are no constants, and of what
    is behind them."""

    weights: int
    rest: int


class SlotHeader(NamedTuple):
    """The contents of the header page, in the order of its bytes.

    Attributes:
        step: finished steps of the state; -1 if there is no complete version.
        constant_bytes: of the data, at its beginning; training never changes them.
        weight_bytes: of the data, at its beginning: the constants, the other weights and buffers.
        index_checksum, metadata_checksum: xxh3-64.
        constants_checksum: `checksum_of` the constant bytes of the data.
        checksums: of the other weights and buffers, and of the rest; None if they were not
            computed.
    """

    generation: int
    rank: int
    world_size: int
    index_bytes: int
    data_bytes: int
    constant_bytes: int = 0
    weight_bytes: int = 0
    step: int = -1
    index_checksum: int = 0
    metadata_bytes: int = 0
    metadata_checksum: int = 0
    constants_checksum: int = 0
    checksums: SlotChecksums | None = None

    @property
    def metadata_offset(self) -> int:
        """The index comes before it, from the second page on."""
        return PAGE_BYTES + _round_up_to_pages(self.index_bytes)

    @property
    def data_offset(self) -> int:
        return self.metadata_offset + METADATA_CAPACITY

    @property
    def nbytes(self) -> int:
        """Size of the image."""
        return self.data_offset + _round_up_to_pages(self.data_bytes)

    @property
    def prefix_bytes(self) -> int:
        """Size of the part of the image that has all weights and buffers."""
        return self.data_offset + self.weight_bytes

    def parts(self) -> list[tuple[slice, int]]:
        """The parts of the data, in order, with the checksum of each; none if they have none."""
        if self.checksums is None:
            return []
        edges = [0, self.constant_bytes, self.weight_bytes, self.data_bytes]
        return [
            (slice(*edge), checksum)
            for edge, checksum in zip(
                pairwise(edges), (self.constants_checksum, *self.checksums), strict=True
            )
        ]

    def holds(self, ref: SlotRef) -> bool:
        """Whether this is the header of that version, complete."""
        return (self.generation, self.rank, self.step) == (ref.generation, ref.rank, ref.step)

    def encode(self) -> bytes:
        """`HEADER_BYTES` bytes; the last 8 are a checksum of the rest."""
        *fields, checksums = self
        hashed = checksums is not None
        raw = _HEADER_STRUCT.pack(_MAGIC, _FORMAT_VERSION, *fields, hashed, *(checksums or (0, 0)))
        return raw + _CHECKSUM_STRUCT.pack(xxh3_64_intdigest(raw))

    @classmethod
    def decode(cls, raw: bytes) -> SlotHeader | None:
        """The header in these bytes; None if they are no valid header. Raises SlotDamagedError if
        the header has another format version."""
        packed, checksum = raw[: _HEADER_STRUCT.size], raw[_HEADER_STRUCT.size : HEADER_BYTES]
        if len(raw) < HEADER_BYTES or not packed.startswith(_MAGIC):
            return None
        if _CHECKSUM_STRUCT.unpack(checksum)[0] != xxh3_64_intdigest(packed):
            return None
        _, version, *fields, hashed, weights, rest = _HEADER_STRUCT.unpack(packed)
        if version != _FORMAT_VERSION:
            raise SlotDamagedError(
                f"a vault slot of format version {version}",
                f"version {_FORMAT_VERSION}",
                "the same version of rayzero on all nodes",
            )
        return cls._make([*fields, SlotChecksums(weights, rest) if hashed else None])


def _round_up_to_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def read_header(fd: int) -> SlotHeader | None:
    """The buffer's current header; None if it is invalid, or being written."""
    return SlotHeader.decode(os.pread(fd, HEADER_BYTES, 0))


def write_header(fd: int, header: SlotHeader) -> None:
    os.pwrite(fd, header.encode(), 0)


def read_pin(fd: int) -> bool:
    """Whether the version is pinned for a checkpoint."""
    return os.pread(fd, 1, PIN_OFFSET) == b"\1"


def clear_pin(fd: int) -> None:
    os.pwrite(fd, b"\0", PIN_OFFSET)


def is_kept(fd: int) -> bool:
    """Whether the version is pinned for other nodes: to be copied there, copied, or a replica."""
    return any(os.pread(fd, _COPY_STRUCT.size, COPY_OFFSET))


def is_to_copy(fd: int) -> bool:
    """Whether the version is to be copied to other nodes, and not all of them have it."""
    return os.pread(fd, _COPY_STRUCT.size, COPY_OFFSET) == _COPY_STRUCT.pack(_TO_COPY)


def write_kept(fd: int, kept: bool) -> None:
    os.pwrite(fd, _COPY_STRUCT.pack(_TO_COPY if kept else 0), COPY_OFFSET)


def write_copied(fd: int, nbytes: int) -> None:
    """All nodes have the version, for which so many bytes were copied."""
    os.pwrite(fd, _COPY_STRUCT.pack(_TO_COPY + max(1, nbytes)), COPY_OFFSET)


def encode_index(index: BlockIndex) -> bytes:
    return json.dumps(index.to_json(), separators=(",", ":")).encode()


def checksum_of(data: memoryview, threads: int = 1) -> int:
    """The checksum of a slot's data; `threads`: of so many chunks at once, without the GIL."""
    chunks = [data[span] for span in chunk_spans(0, len(data))]
    if threads == 1 or len(chunks) == 1:
        return combine_checksums([xxh3_64_intdigest(chunk) for chunk in chunks])
    with ThreadPoolExecutor(threads, "rayzero-checksum") as pool:
        return combine_checksums([*pool.map(xxh3_64_intdigest, chunks)])


def chunk_spans(start: int, stop: int) -> list[slice]:
    """The chunks of bytes that have one checksum together; at least one, which may be empty."""
    edges = [*range(start, max(stop, start + 1), CHUNK_BYTES), stop]
    return [slice(*pair) for pair in pairwise(edges)]


def combine_checksums(chunks: Sequence[int]) -> int:
    """The checksum of data from the xxh3-64 of each of its chunks of `CHUNK_BYTES`."""
    if len(chunks) == 1:
        return chunks[0]
    return xxh3_64_intdigest(b"".join(it.to_bytes(8, "little") for it in chunks))


class SlotWriter:
    """One of a rank's buffers. Used by one thread at a time.

    Args:
        mapping: a buffer reserved by the vault; its contents stay there.
        index: that of the state to be written.
    """

    def __init__(self, mapping: SlotMapping, index: BlockIndex) -> None:
        index_json = encode_index(index)
        self.mapping = mapping
        self.index = index
        self._map = mapping.memory
        header = SlotHeader.decode(self._map[:HEADER_BYTES])
        if header is None:
            raise SlotGoneError("the vault returned a buffer without a valid header")
        self._map[PAGE_BYTES : PAGE_BYTES + len(index_json)] = index_json
        self._header = header._replace(
            index_checksum=xxh3_64_intdigest(index_json),
            constant_bytes=index.constant_bytes,
            weight_bytes=index.weight_bytes,
        )
        self._begun = False
        self.constants_version = -1
        """`TrainingState.constants_version` of the constants in `data`, for their writer."""
        self.constants_checksum = checksum_of(memoryview(b""))
        """The checksum of the constants in `data`; set by their writer, before `commit`."""
        with memoryview(self._map) as image:
            self.data = image[header.data_offset : header.data_offset + header.data_bytes]
            """The state's bytes. May be changed between `begin` and `commit` only."""

    @property
    def step(self) -> int:
        """Finished steps of the stored state; -1 if there is no complete version."""
        return self._header.step

    @property
    def constant_bytes(self) -> int:
        """The first bytes of `data`, which training never changes."""
        return self._header.constant_bytes

    @property
    def weight_bytes(self) -> int:
        """The first bytes of `data`: the constants, the other weights and buffers."""
        return self._header.weight_bytes

    @property
    def pinned(self) -> bool:
        """Whether the stored version must not be overwritten yet."""
        return self.awaits_checkpoint or self.is_kept

    @property
    def awaits_checkpoint(self) -> bool:
        """Whether it is pinned for a checkpoint. The vault clears this pin."""
        return self.step >= 0 and self._map[PIN_OFFSET] == 1

    @property
    def is_kept(self) -> bool:
        """Whether it is pinned for other nodes, until `let_go`."""
        return self.step >= 0 and self._copy > 0

    @property
    def copied_bytes(self) -> int:
        """The bytes that were copied to other nodes, once all of them have the version; else 0."""
        return max(0, self._copy - _TO_COPY) if self.step >= 0 else 0

    @property
    def _copy(self) -> int:
        value: int = _COPY_STRUCT.unpack_from(self._map, COPY_OFFSET)[0]
        return value

    def let_go(self) -> None:
        """Ends the pin for other nodes, which the vault writes until `copied_bytes` are there."""
        _COPY_STRUCT.pack_into(self._map, COPY_OFFSET, 0)

    def begin(self) -> None:
        """Invalidates the stored version; `data` may be changed after this. Raises EngineError if
        the version is pinned."""
        if self.pinned:
            raise EngineError(
                f"the copy of step {self.step} in the vault is pinned and cannot be overwritten"
            )
        self._begun = True
        self._write_header(self._header._replace(step=-1))

    def commit(
        self,
        step: int,
        metadata: bytes,
        pin: bool,
        checksums: SlotChecksums | None,
        keep: bool = False,
    ) -> None:
        """Marks `data` as the complete version of a step. Raises SlotRoomError if `metadata` is too
        large, and the buffer then holds no version; EngineError if `begin` was not called before.

        Args:
            metadata: the state's JSON metadata.
            pin: for a checkpoint, until the vault unpins it.
            checksums: of `data` behind its constants; None if they were not computed.
            keep: for other nodes, until `let_go`.
        """
        if not self._begun:
            raise EngineError("SlotWriter.commit without a SlotWriter.begin before it")
        if len(metadata) > METADATA_CAPACITY:
            raise SlotRoomError(
                f"the state's metadata takes {len(metadata):,} bytes as JSON",
                f"up to {METADATA_CAPACITY:,}",
                "smaller values in the optimizer's param groups or in the LR scheduler's state",
            )
        start = self._header.metadata_offset
        self._map[start : start + len(metadata)] = metadata
        # Pins before the header: no reader sees the version unpinned.
        self._map[PIN_OFFSET] = int(pin)
        _COPY_STRUCT.pack_into(self._map, COPY_OFFSET, _TO_COPY if keep else 0)
        self._write_header(
            self._header._replace(
                step=step,
                metadata_bytes=len(metadata),
                metadata_checksum=xxh3_64_intdigest(metadata),
                constants_checksum=self.constants_checksum,
                checksums=checksums,
            )
        )
        self._begun = False

    def copy_version(self, other: SlotWriter) -> None:
        """Copies the complete version of another buffer, of a state with the same index. Damage is
        copied, too, and found by its checksum."""
        header = other._header
        start = header.metadata_offset
        self.begin()
        self.data[:] = other.data
        self.constants_checksum = header.constants_checksum
        metadata = other._map[start : start + header.metadata_bytes]
        self.commit(header.step, metadata, False, header.checksums)

    def _write_header(self, header: SlotHeader) -> None:
        self._header = header
        self._map[:HEADER_BYTES] = header.encode()
