"""Checksums of a file that is being written, or read back."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from xxhash import xxh3_64

from rayzero.engine.checkpoint.format import BLOCK_BYTES
from rayzero.engine.checkpoint.manifest import DataFile
from rayzero.engine.checkpoint.store_local import Store

_CHUNK_BYTES = 32 * BLOCK_BYTES  # per write: efficient for disks, fits in CPU caches
_READ_BYTES = 16 * BLOCK_BYTES


class Checksums:
    """Checksums of a file and of its blocks, computed while it is written."""

    def __init__(self) -> None:
        self.whole = xxh3_64()
        self.blocks: list[str] = []

    def chunks(self, header: bytes, data: memoryview) -> Generator[memoryview]:
        """The file's chunks; another thread hashes one while the caller writes it. The thread ends
        with the iterator. Hashing and writing both release the GIL."""
        with ThreadPoolExecutor(1, "rayzero-checksum") as executor:
            self.whole.update(header)
            yield memoryview(header)
            for start in range(0, len(data), _CHUNK_BYTES):
                chunk = data[start : start + _CHUNK_BYTES]
                future = executor.submit(self._hash_chunk, chunk)
                yield chunk
                future.result()

    def _hash_chunk(self, chunk: memoryview) -> None:
        self.whole.update(chunk)
        self.blocks += [
            xxh3_64(chunk[start : start + BLOCK_BYTES]).hexdigest()
            for start in range(0, len(chunk), BLOCK_BYTES)
        ]


def find_damage(
    store: Store, file: DataFile, progress: Callable[[int], None]
) -> tuple[list[int], bool]:
    """The damaged blocks of a file, of which every byte is read, and whether it is damaged
    elsewhere. `progress` is called with the number of bytes of data read since the last call."""
    memory = memoryview(bytearray(min(_READ_BYTES, file.nbytes)))
    damaged, whole = [], xxh3_64()
    with closing(store.open(file.name)) as opened:
        for start in range(0, file.data_offset, _READ_BYTES):
            opened.read(start, [chunk := memory[: min(_READ_BYTES, file.data_offset - start)]])
            whole.update(chunk)
        for start in range(0, file.data_bytes, _READ_BYTES):
            chunk = memory[: min(_READ_BYTES, file.data_bytes - start)]
            opened.read(file.data_offset + start, [chunk])
            whole.update(chunk)
            for inside in range(0, len(chunk), BLOCK_BYTES):
                number = (start + inside) // BLOCK_BYTES
                if not file.block_matches(number, chunk[inside : inside + BLOCK_BYTES]):
                    damaged.append(number)
            progress(len(chunk))
    return damaged, not damaged and whole.hexdigest() != file.checksum
