"""Any bytes out of a rank's file, each block of them compared with its checksum."""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

from rayzero.engine.checkpoint.errors import CheckpointDamagedError
from rayzero.engine.checkpoint.format import BLOCK_BYTES, block_count
from rayzero.engine.checkpoint.manifest import FileEntry
from rayzero.engine.checkpoint.storage import OpenFile
from rayzero.engine.errors import EngineError


class BlockFile:
    """An open file of a checkpoint.

    Whole blocks are read straight into the caller's memory. A block that is wanted in part is kept,
    because the next read usually goes on where this one ended and needs the rest of it.

    Attributes:
        bytes_read: from the file, so far.
    """

    def __init__(self, file: OpenFile, entry: FileEntry, where: str, *, verify: bool) -> None:
        """
        Args:
            file: stays the caller's to close.
            where: what the file is called in errors.
            verify: without, exactly what is wanted is read, and compared with nothing.
        """
        self.bytes_read = 0
        self._file = file
        self._entry = entry
        self._where = where
        self._verify = verify
        self._kept = -1  # the number of the block in `_memory`
        self._memory = memoryview(b"")

    def read(self, offset: int, into: memoryview) -> None:
        """Fills `into` (bytes, writable) from byte `offset` of the data.

        Raises:
            CheckpointDamagedError: a block is not what was written. It names file and block.
        """
        if not 0 <= offset <= offset + len(into) <= self._nbytes:
            span = f"bytes {offset} to {offset + len(into)}"
            raise EngineError(f"{span} of {self._where} were wanted, which has {self._nbytes}")
        if not self._verify:
            self._fetch(offset, [into])
            return
        done = 0
        while done < len(into):
            done += self._from_kept(offset + done, into[done:])
            if done < len(into):
                done += self._from_file(offset + done, into[done:])

    @property
    def _nbytes(self) -> int:
        return self._entry.table.nbytes

    def _from_kept(self, offset: int, into: memoryview) -> int:
        """What the kept block has of it; the number of bytes."""
        block, inside = divmod(offset, BLOCK_BYTES)
        if block != self._kept:
            return 0
        found = self._memory[inside : inside + len(into)]
        into[: len(found)] = found
        return len(found)

    def _from_file(self, offset: int, into: memoryview) -> int:
        """Fills the whole blocks at the beginning of `into`, and keeps the next block if some of it
        is wanted too, both in one request; the number of bytes filled."""
        block, inside = divmod(offset, BLOCK_BYTES)
        to_the_end = offset + len(into) == self._nbytes
        whole = len(into) if to_the_end else len(into) - len(into) % BLOCK_BYTES
        direct = into[: 0 if inside else whole]
        after = block + block_count(len(direct))
        kept = memoryview(b"")
        if len(direct) < len(into):
            self._kept = -1
            kept = self._room(after)
        self._fetch(block * BLOCK_BYTES, [part for part in (direct, kept) if part])
        self._check(block, direct)
        if kept:
            self._check(after, kept)
            self._memory, self._kept = kept, after
        return len(direct)

    def _room(self, block: int) -> memoryview:
        """Memory for one block, the same again and again."""
        size = min(BLOCK_BYTES, self._nbytes - block * BLOCK_BYTES)
        if len(self._memory) < size:
            self._memory = memoryview(bytearray(BLOCK_BYTES))
        return self._memory[:size]

    def _fetch(self, offset: int, parts: list[memoryview]) -> None:
        wanted = sum(len(part) for part in parts)
        found = self._file.read(self._entry.data_offset + offset, parts)
        self.bytes_read += found
        if found != wanted:
            block = (offset + found) // BLOCK_BYTES
            raise CheckpointDamagedError(f"{self._where} ends in block {block} of its data")

    def _check(self, block: int, data: memoryview) -> None:
        """Compares whole blocks with their checksums."""
        for number, at in enumerate(range(0, len(data), BLOCK_BYTES), start=block):
            if xxh3_64_intdigest(data[at : at + BLOCK_BYTES]) != self._entry.blocks[number]:
                raise CheckpointDamagedError(
                    f"{self._where} is damaged: block {number} of its data has another checksum"
                )
