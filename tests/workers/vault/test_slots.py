"""A slot buffer, its header, and its writer, which is killed at every line it executes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from struct import pack_into
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from rayzero.engine.errors import EngineError
from rayzero.workers.vault import slots
from rayzero.workers.vault.buffers import BufferPool
from rayzero.workers.vault.images import MappedSlotReader
from rayzero.workers.vault.mappings import SlotMapping
from rayzero.workers.vault.records import SlotDamagedError, SlotGoneError, SlotRef, SlotRoomError
from rayzero.workers.vault.slots import (
    HEADER_BYTES,
    METADATA_CAPACITY,
    PAGE_BYTES,
    PIN_OFFSET,
    SlotChecksums,
    SlotHeader,
    SlotWriter,
    checksum_of,
    clear_pin,
    encode_index,
    read_pin,
    write_header,
)
from tests.workers.vault.support import content, table, write

TABLE_JSON = encode_index(table())


@pytest.fixture
def fds() -> Iterator[list[int]]:
    """Two buffers as a vault reserves them."""
    pool = BufferPool()
    header = SlotHeader(1, 0, 1, len(TABLE_JSON), table().nbytes)
    buffers = [pool.acquire(header.nbytes) for _ in range(2)]
    for buffer in buffers:
        write_header(buffer.fd, header)
    yield [buffer.fd for buffer in buffers]
    pool.release(buffers)
    pool.trim()


def read(fd: int, step: int) -> tuple[bytes, dict[str, Any]]:
    """The verified data and metadata of a complete version."""
    image = MappedSlotReader(SlotRef(1, 0, step, "a"), fd)
    try:
        image.verify()
        assert image.index() == table()
        return bytes(image.data), image.metadata()
    finally:
        image.close()


def test_version_exists_from_commit_to_begin(fds: list[int]):
    buffer = SlotWriter(SlotMapping(fds[0]), table())
    assert (buffer.step, buffer.pinned) == (-1, False)
    write(buffer, 0, 5)
    assert (buffer.step, buffer.pinned) == (5, False)
    assert read(fds[0], 5) == (content(0, 5), {"step": 5, "rank": 0})
    buffer.begin()
    assert buffer.step == -1
    with pytest.raises(SlotGoneError, match="rank 0, step 5"):
        read(fds[0], 5)


def test_pinned_version_cannot_be_overwritten(fds: list[int]):
    buffer = SlotWriter(SlotMapping(fds[0]), table())
    write(buffer, 0, 5, pin=True)
    assert buffer.pinned
    with pytest.raises(EngineError, match="step 5 in the vault is pinned"):
        buffer.begin()
    assert read(fds[0], 5)[0] == content(0, 5)
    clear_pin(fds[0])  # as the vault does
    assert not buffer.pinned
    write(buffer, 0, 6)
    assert not read_pin(fds[0])


def test_invalid_commits(fds: list[int]):
    buffer = SlotWriter(SlotMapping(fds[0]), table())
    with pytest.raises(EngineError, match=r"without a SlotWriter\.begin"):
        buffer.commit(1, b"{}", False, None)
    buffer.begin()
    with pytest.raises(SlotRoomError, match="262,145 bytes"):
        buffer.commit(1, b"x" * (METADATA_CAPACITY + 1), False, None)
    assert buffer.step == -1
    buffer.commit(1, b"{}", False, None)
    with pytest.raises(EngineError, match=r"without a SlotWriter\.begin"):
        buffer.commit(2, b"{}", False, None)


def test_memory_stays_mapped_while_view_exists(fds: list[int]):
    buffer = SlotWriter(SlotMapping(fds[0]), table())
    before = len(os.listdir("/proc/self/fd"))
    data = buffer.data
    del buffer
    data[:3] = b"abc"
    assert bytes(data[:3]) == b"abc"
    del data
    assert len(os.listdir("/proc/self/fd")) == before - 1


def killed_at_line(number: int, buffer: SlotWriter) -> bool:
    """Write step 3 in a child process that kills itself before its n-th line in `slots`.

    Returns False if the child finished before that line.
    """
    child = os.fork()
    if not child:
        lines = 0

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal lines
            if frame.f_code.co_filename != slots.__file__:
                return None
            if event == "line":
                lines += 1
                if lines == number:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        write(buffer, 0, 3, pin=True)
        sys.settrace(None)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_writer_killed_at_any_line_leaves_only_complete_versions(fds: list[int]):
    old, new = (SlotWriter(SlotMapping(fd), table()) for fd in fds)
    outcomes = []
    for number in range(1, 100):
        clear_pin(fds[1])
        write(new, 0, 1)  # what the child overwrites
        write(old, 0, 2)
        killed = killed_at_line(number, new)
        assert read(fds[0], 2)[0] == content(0, 2)
        outcomes.append(state_of(fds[1]))
        if not killed:
            break
    assert not killed
    assert outcomes == sorted(outcomes, key=["old", "torn", "new"].index)
    assert set(outcomes) == {"old", "torn", "new"}
    assert len(outcomes) > 10


def state_of(fd: int) -> str:
    """The version in a buffer; a version that is marked complete must be complete."""
    for step, name in ((1, "old"), (3, "new")):
        try:
            assert read(fd, step) == (content(0, step), {"step": step, "rank": 0})
        except SlotGoneError:
            continue
        assert read_pin(fd) == (step == 3)
        return name
    return "torn"


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
