"""TensorBoard's event files, written by hand: the libraries that write them bring torch with them.

A file is a row of records: the length as 8 bytes, its checksum, the data, its checksum (masked
CRC-32C, all little-endian). The data are `Event` messages in protobuf's wire format, their fields
numbered as in TensorBoard's event.proto and summary.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_START = 1
"""SessionLog.START."""


def record(data: bytes) -> bytes:
    """One record of an event file."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked(length)) + data + struct.pack("<I", _masked(data))


def first_event(at_s: float) -> bytes:
    """What a file begins with. `at_s` is Unix time, here and below."""
    return _double(1, at_s) + _text(3, "brain.Event:2")


def scalars_event(at_s: float, step: int, values: Mapping[str, float]) -> bytes:
    """The values of a step, by tag."""
    pairs = (_text(1, tag) + _float(2, value) for tag, value in values.items())
    summary = b"".join(_field(1, pair) for pair in pairs)
    return _double(1, at_s) + _whole(2, step) + _field(5, summary)


def restart_event(at_s: float, step: int) -> bytes:
    """What the file says of this step and later ones up to here no longer holds."""
    return _double(1, at_s) + _whole(2, step) + _field(7, _whole(1, _START))


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _key(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _whole(number: int, value: int) -> bytes:
    return _key(number, _VARINT) + _varint(value)


def _double(number: int, value: float) -> bytes:
    return _key(number, _FIXED64) + struct.pack("<d", value)


def _float(number: int, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:  # larger than a float32 can be
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _key(number, _FIXED32) + packed


def _field(number: int, data: bytes) -> bytes:
    return _key(number, _BYTES) + _varint(len(data)) + data


def _text(number: int, text: str) -> bytes:
    return _field(number, text.encode())


def _table() -> tuple[int, ...]:
    """CRC-32C (Castagnoli, 1993), reflected, a byte at a time."""
    found = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        found.append(crc)
    return tuple(found)


_CRC = _table()


def _masked(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
