from __future__ import annotations

from struct import pack_into

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from rayzero.workers.vault import slots
from rayzero.workers.vault.records import SlotDamagedError
from rayzero.workers.vault.slots import (
    HEADER_BYTES,
    METADATA_CAPACITY,
    PAGE_BYTES,
    PIN_OFFSET,
    SlotChecksums,
    SlotHeader,
    checksum_of,
)

SIZES = st.integers(0, 2**48)
WORDS = st.integers(0, 2**64 - 1)
RANKS = st.integers(0, 2**32 - 1)
HEADERS = st.builds(
    SlotHeader,
    generation=st.integers(0, 2**62),
    rank=RANKS,
    world_size=RANKS,
    index_bytes=SIZES,
    data_bytes=SIZES,
    step=st.integers(-1, 2**62),
    index_checksum=WORDS,
    metadata_bytes=SIZES,
    metadata_checksum=WORDS,
    constant_bytes=SIZES,
    constants_checksum=WORDS,
    weight_bytes=SIZES,
    checksums=st.none() | st.builds(SlotChecksums, WORDS, WORDS),
)


@given(HEADERS)
def test_decode_reverses_encode(header: SlotHeader):
    raw = header.encode()
    assert len(raw) == HEADER_BYTES <= PIN_OFFSET
    assert SlotHeader.decode(raw) == header
    assert SlotHeader.decode(raw + b"rest of the page") == header


@given(HEADERS, HEADERS, st.integers(0, HEADER_BYTES))
def test_torn_header_decodes_to_none_or_to_either_header(
    old: SlotHeader, new: SlotHeader, cut: int
):
    torn = new.encode()[:cut] + old.encode()[cut:]
    assert SlotHeader.decode(torn) in (None, old, new)


@given(HEADERS, st.integers(0, HEADER_BYTES * 8 - 1))
def test_flipped_bit_invalidates_header(header: SlotHeader, bit: int):
    raw = bytearray(header.encode())
    raw[bit // 8] ^= 1 << bit % 8
    assert SlotHeader.decode(bytes(raw)) is None


@pytest.mark.parametrize("raw", [b"", b"\0" * PAGE_BYTES, b"x" * 20])
def test_other_bytes_decode_to_none(raw: bytes):
    assert SlotHeader.decode(raw) is None


def test_another_format_version_is_error():
    raw = bytearray(SlotHeader(1, 0, 1, 1, 1).encode())
    pack_into("<I", raw, 8, 9)
    pack_into("<Q", raw, HEADER_BYTES - 8, xxh3_64_intdigest(bytes(raw[:-8])))
    with pytest.raises(SlotDamagedError, match="format version 9"):
        SlotHeader.decode(bytes(raw))


@given(HEADERS)
def test_parts_are_page_aligned_and_large_enough(header: SlotHeader):
    starts = [PAGE_BYTES, header.metadata_offset, header.data_offset, header.nbytes]
    sizes = [header.index_bytes, METADATA_CAPACITY, header.data_bytes]
    assert all(start % PAGE_BYTES == 0 for start in starts)
    for start, end, size in zip(starts[:-1], starts[1:], sizes, strict=True):
        assert size <= end - start < size + PAGE_BYTES


@pytest.mark.parametrize("nbytes", [0, 1, 100, 101, 999])
def test_threads_compute_the_same_checksum(nbytes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slots, "CHUNK_BYTES", 100)
    data = memoryview(bytes(range(250)) * 4)[:nbytes]
    assert checksum_of(data, threads=3) == checksum_of(data)
