"""A slot buffer and its writer, which is killed at every line it executes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from rayzero.engine.errors import EngineError
from rayzero.workers.vault import slots
from rayzero.workers.vault.buffers import BufferPool
from rayzero.workers.vault.images import MappedSlotReader
from rayzero.workers.vault.mappings import SlotMapping
from rayzero.workers.vault.records import SlotGoneError, SlotRef, SlotRoomError
from rayzero.workers.vault.slots import (
    METADATA_CAPACITY,
    SlotHeader,
    SlotWriter,
    encode_index,
    read_pin,
    write_header,
    write_pin,
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
    write_pin(fds[0], False)  # as the vault does
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
        write_pin(fds[1], False)
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
