"""Frames of gzip and zstd files: each can be decompressed without those before it."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from typing import TypeAlias

import pyarrow as pa

from rayzero.engine.data.streams.sources.files import SourceReader

Piece: TypeAlias = tuple[int, int, bytes]
"""First byte in the file, bytes in the file, content uncompressed."""

_SUFFIXES = {".gz": "gzip", ".tgz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_BUFFER_BYTES = 1 << 20
_GZIP = 16 + zlib.MAX_WBITS
_ZSTD_MAGIC = 0xFD2FB528
_ZSTD_SKIPPED = 0x184D2A50  # and the next fifteen
_ZSTD_ONE_BYTE = 1  # the kind of a block that is one byte, repeated


def codec_of(name: str) -> str:
    """gzip, zstd, or an empty string for other names."""
    return next((it for suffix, it in _SUFFIXES.items() if name.endswith(suffix)), "")


def decompress(codec: str, content: memoryview) -> bytes:
    """The content of one frame or more; itself without a codec."""
    if not codec:
        return content.tobytes()
    with pa.CompressedInputStream(pa.BufferReader(content), codec) as stream:
        return bytes(stream.read())


def read_frames(reader: SourceReader, codec: str) -> Iterator[Piece]:
    """The frames of a file, in sequence; members in gzip's words. One is in memory at a time."""
    frames = {"gzip": _gzip_frames, "zstd": _zstd_frames}[codec]
    yield from frames(io.BufferedReader(reader, _BUFFER_BYTES), reader.file.nbytes)


def _gzip_frames(stream: io.BufferedReader, nbytes: int) -> Iterator[Piece]:
    start = 0
    while start < nbytes:
        member = zlib.decompressobj(_GZIP)
        content = bytearray()
        stream.seek(start)
        while not member.eof:
            raw = stream.read(1 << 16)
            if not raw:
                raise EOFError("it ends within a gzip member")
            content += member.decompress(raw)
        end = stream.tell() - len(member.unused_data)
        yield start, end - start, bytes(content)
        start = end


def _zstd_frames(stream: io.BufferedReader, nbytes: int) -> Iterator[Piece]:
    start = 0
    while start < nbytes:
        stream.seek(start)
        head = stream.read(8)
        magic = int.from_bytes(head[:4], "little")
        if magic & ~0xF == _ZSTD_SKIPPED:
            start += 8 + int.from_bytes(head[4:], "little")
            continue
        if magic != _ZSTD_MAGIC:
            raise ValueError(f"there is no zstd frame at byte {start}")
        end = _find_zstd_end(stream, start, head[4])
        stream.seek(start)
        raw = stream.read(end - start)
        if len(raw) < end - start:
            raise EOFError("it ends within a zstd frame")
        yield start, end - start, decompress("zstd", memoryview(raw))
        start = end


def _find_zstd_end(stream: io.BufferedReader, start: int, flags: int) -> int:
    """The end of a frame, by the sizes of its blocks (RFC 8878, section 3.1.1)."""
    one_segment = flags >> 5 & 1
    size_bytes = (one_segment, 2, 4, 8)[flags >> 6]
    dictionary_bytes = (0, 1, 2, 4)[flags & 3]
    position = start + 5 + (1 - one_segment) + size_bytes + dictionary_bytes
    is_last = 0
    while not is_last:
        stream.seek(position)
        raw = stream.read(3)
        if len(raw) < 3:
            raise EOFError("it ends within a zstd frame")
        header = int.from_bytes(raw, "little")
        is_last = header & 1
        kind = header >> 1 & 3
        position += 3 + (1 if kind == _ZSTD_ONE_BYTE else header >> 3)
    return position + (4 if flags & 4 else 0)  # its checksum
