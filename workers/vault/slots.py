"""Slot buffers: the header page, and the writer that keeps a buffer consistent.

An *image* is all bytes of a buffer: the header page, the state's index as JSON, space for the
state's JSON metadata, and the data, each part on pages of its own. An image describes itself: a
copy of it is a replica, and can be read without its writer.

The order of writes in `begin` and `commit` makes a kill at any point harmless. `begin` writes a
header without a version before the first byte of data changes; `commit` writes the version into the
header after the last byte has changed. The header carries its own checksum, so that a half-written
header is invalid. A writer that is killed in between leaves a buffer without a complete version;
the rank's other buffers are untouched.

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
"""Offset of the byte that pins the version for a checkpoint. It is no field of the header, because
the slot's writer sets it and the vault clears it."""

COPY_OFFSET = PIN_OFFSET + 8
"""Offset of the integer that pins the version for other nodes. It has one writer at a time: the
slot's writer sets it to `_TO_COPY`, then the vault calls `write_copied`, then the slot's writer
sets it to 0."""

METADATA_CAPACITY = 256 * 1024
"""Space for the JSON metadata in bytes."""

CHUNK_BYTES = 64 * 2**20
"""Size of the chunks that are hashed separately, so that threads can share the work. The checksum
of data is the checksum of its chunks' checksums. A slot's data has three checksums: of the
constants, which training never changes and which are hashed only once; of the other weights and
buffers, which are also read without the rest; and of the rest."""

_MAGIC = b"RZ slot\0"
_FORMAT_VERSION = 5
_HEADER_STRUCT = Struct("<8sIqIIQQQQqQQQQ?QQ")
_CHECKSUM_STRUCT = Struct("<Q")
_COPY_STRUCT = Struct("<Q")
_TO_COPY = 1
HEADER_BYTES = _HEADER_STRUCT.size + _CHECKSUM_STRUCT.size


class SlotChecksums(NamedTuple):
    """The checksums (`checksum_of`) of a slot's data behind the constants: `weights` of the other
    weights and buffers, `rest` of everything after them."""

    weights: int
    rest: int


class SlotHeader(NamedTuple):
    """The contents of the header page, in the order of its bytes.

    Attributes:
        step: finished steps of the state; -1 if there is no complete version.
        constant_bytes: size of the constants, with which the data begins. Training never changes
            them.
        weight_bytes: size of the constants and the other weights and buffers, with which the data
            begins.
        index_checksum, metadata_checksum: xxh3-64.
        constants_checksum: `checksum_of` the constants.
        checksums: of the data behind the constants; None if they were not computed.
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
        """The offset of the JSON metadata. The index precedes it, from the second page on."""
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
        """Size of the image up to the end of the weights and buffers."""
        return self.data_offset + self.weight_bytes

    def parts(self) -> list[tuple[slice, int]]:
        """Returns the span and the checksum of each part of the data, in order; nothing if the
        checksums were not computed."""
        if self.checksums is None:
            return []
        edges = [0, self.constant_bytes, self.weight_bytes, self.data_bytes]
        spans = [slice(start, stop) for start, stop in pairwise(edges)]
        return list(zip(spans, (self.constants_checksum, *self.checksums), strict=True))

    def holds(self, ref: SlotRef) -> bool:
        """Returns whether this is the header of that version, and the version is complete."""
        return (self.generation, self.rank, self.step) == (ref.generation, ref.rank, ref.step)

    def encode(self) -> bytes:
        """Returns `HEADER_BYTES` bytes; the last 8 are a checksum of the rest."""
        *fields, checksums = self
        hashed = checksums is not None
        raw = _HEADER_STRUCT.pack(_MAGIC, _FORMAT_VERSION, *fields, hashed, *(checksums or (0, 0)))
        return raw + _CHECKSUM_STRUCT.pack(xxh3_64_intdigest(raw))

    @classmethod
    def decode(cls, raw: bytes) -> SlotHeader | None:
        """Returns the header in these bytes; None if they are no valid header. Raises
        SlotDamagedError if the header has another format version."""
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
                "install the same version of rayzero on all nodes",
            )
        return cls._make([*fields, SlotChecksums(weights, rest) if hashed else None])


def _round_up_to_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def read_header(fd: int) -> SlotHeader | None:
    """Returns the buffer's current header; None if the header is invalid, or being written."""
    return SlotHeader.decode(os.pread(fd, HEADER_BYTES, 0))


def write_header(fd: int, header: SlotHeader) -> None:
    os.pwrite(fd, header.encode(), 0)


def read_pin(fd: int) -> bool:
    """Returns whether the version is pinned for a checkpoint."""
    return os.pread(fd, 1, PIN_OFFSET) == b"\1"


def clear_pin(fd: int) -> None:
    os.pwrite(fd, b"\0", PIN_OFFSET)


def is_kept(fd: int) -> bool:
    """Returns whether the version is pinned for other nodes: it is to be copied to other nodes, it
    was copied to them, or it is a replica itself."""
    return any(os.pread(fd, _COPY_STRUCT.size, COPY_OFFSET))


def is_to_copy(fd: int) -> bool:
    """Returns whether at least one node that is to have a copy of the version lacks it."""
    return os.pread(fd, _COPY_STRUCT.size, COPY_OFFSET) == _COPY_STRUCT.pack(_TO_COPY)


def write_kept(fd: int, kept: bool) -> None:
    os.pwrite(fd, _COPY_STRUCT.pack(_TO_COPY if kept else 0), COPY_OFFSET)


def write_copied(fd: int, nbytes: int) -> None:
    """Notes that all nodes that are to have the version have it, and that `nbytes` were copied."""
    os.pwrite(fd, _COPY_STRUCT.pack(_TO_COPY + max(1, nbytes)), COPY_OFFSET)


def encode_index(index: BlockIndex) -> bytes:
    return json.dumps(index.to_json(), separators=(",", ":")).encode()


def checksum_of(data: memoryview, threads: int = 1) -> int:
    """Returns the checksum of a slot's data. Hashes `threads` chunks at once, without the GIL."""
    chunks = [data[span] for span in chunk_spans(0, len(data))]
    if threads == 1 or len(chunks) == 1:
        return combine_checksums([xxh3_64_intdigest(chunk) for chunk in chunks])
    with ThreadPoolExecutor(threads, "rayzero-checksum") as pool:
        return combine_checksums([*pool.map(xxh3_64_intdigest, chunks)])


def chunk_spans(start: int, stop: int) -> list[slice]:
    """Returns the chunks of the bytes from `start` to `stop` that are hashed separately; at least
    one, which may be empty."""
    edges = [*range(start, max(stop, start + 1), CHUNK_BYTES), stop]
    return [slice(*pair) for pair in pairwise(edges)]


def combine_checksums(chunks: Sequence[int]) -> int:
    """Returns the checksum of data, given the xxh3-64 of each of its chunks of `CHUNK_BYTES`."""
    if len(chunks) == 1:
        return chunks[0]
    return xxh3_64_intdigest(b"".join(chunk.to_bytes(8, "little") for chunk in chunks))


class SlotWriter:
    """Writes the versions in one of a rank's buffers. Used by one thread at a time.

    Args:
        mapping: the buffer, which the vault has reserved and owns.
        index: the index of the state to be written.
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
        """The `TrainingState.constants_version` of the constants in `data`. Set and read by the
        code that writes them."""
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
        """Size of the constants, with which `data` begins. Training never changes them."""
        return self._header.constant_bytes

    @property
    def weight_bytes(self) -> int:
        """Size of the constants and the other weights and buffers, with which `data` begins."""
        return self._header.weight_bytes

    @property
    def pinned(self) -> bool:
        """Whether the stored version must not be overwritten yet."""
        return self.awaits_checkpoint or self.is_kept

    @property
    def awaits_checkpoint(self) -> bool:
        """Whether the stored version is pinned for a checkpoint. The vault clears this pin."""
        return self.step >= 0 and self._map[PIN_OFFSET] == 1

    @property
    def is_kept(self) -> bool:
        """Whether the stored version is pinned for other nodes. `let_go` clears this pin."""
        return self.step >= 0 and self._copy > 0

    @property
    def copied_bytes(self) -> int:
        """Bytes that were copied to other nodes, once all of them have the version; 0 before."""
        return max(0, self._copy - _TO_COPY) if self.step >= 0 else 0

    @property
    def _copy(self) -> int:
        value: int = _COPY_STRUCT.unpack_from(self._map, COPY_OFFSET)[0]
        return value

    def let_go(self) -> None:
        """Clears the pin for other nodes. The vault writes the pin, too, as long as `copied_bytes`
        is 0."""
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
            pin: pins the version for a checkpoint, until the vault clears the pin.
            checksums: of `data` behind the constants; None if they were not computed.
            keep: pins the version for other nodes, until `let_go`.
        """
        if not self._begun:
            raise EngineError("SlotWriter.commit without a SlotWriter.begin before it")
        if len(metadata) > METADATA_CAPACITY:
            raise SlotRoomError(
                f"the state's metadata takes {len(metadata):,} bytes as JSON",
                f"up to {METADATA_CAPACITY:,}",
                "store less in the optimizer's param groups and in the LR scheduler's state",
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
        """Copies the complete version in another buffer, whose state has the same index. Damaged
        bytes are copied with their checksum, so that a reader detects the damage."""
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
