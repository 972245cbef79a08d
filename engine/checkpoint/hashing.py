"""Checksums of a file that is being written."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

from xxhash import xxh3_64

from rayzero.engine.checkpoint.format import BLOCK_BYTES

_CHUNK_BYTES = 32 * BLOCK_BYTES  # per write: efficient for disks, fits in CPU caches


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
