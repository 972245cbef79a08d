"""The lifetime of versions in a vault's registry."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from rayzero.workers.vault.buffers import BufferPool
from rayzero.workers.vault.images import MappedSlotReader
from rayzero.workers.vault.mappings import SlotMapping
from rayzero.workers.vault.records import SlotGoneError, SlotInfo
from rayzero.workers.vault.registry import SlotRegistry
from rayzero.workers.vault.slots import SlotHeader, SlotWriter, encode_index, read_header
from tests.workers.vault.support import UNLIMITED_BYTES, keep_only, refs, table, write

KEY = tuple[int, int, int]


class Node:
    """A vault's registry and its clients."""

    def __init__(self) -> None:
        self.pool = BufferPool(lambda: UNLIMITED_BYTES)
        self.registry = SlotRegistry(self.pool)

    def reserve(self, generation: int, rank: int, owner: int = 7, nbytes: int = 64) -> SlotWriter:
        index = table(rank, nbytes)
        length = len(encode_index(index))
        fd = self.registry.reserve(owner, SlotHeader(generation, rank, 2, length, nbytes))
        buffer = SlotWriter(SlotMapping(fd), index)
        os.close(fd)
        return buffer

    def mirror(
        self, generation: int, rank: int, *steps: int, pin: bool = False
    ) -> list[SlotWriter]:
        """Write each step into a separate buffer."""
        buffers = []
        for step in steps:
            buffers.append(self.reserve(generation, rank))
            write(buffers[-1], rank, step, pin=pin)
        return buffers

    def replica(self, generation: int, rank: int, step: int) -> None:
        """Add a replica of another node's version."""
        other = Node()
        other.mirror(generation, rank, step, pin=True)
        [source] = other.registry._entries
        header = read_header(source.buffer.fd)
        assert header is not None
        with self.registry.receive_replica(header):
            pass
        other.registry.close()

    def keys(self, *, pinned: bool | None = None, replica: bool | None = None) -> list[KEY]:
        return sorted(
            (slot.generation, slot.rank, slot.step)
            for slot in self.registry.inventory()
            if pinned in (None, slot.pinned) and replica in (None, slot.replica)
        )


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.registry.close()


def test_inventory_lists_complete_versions(node: Node):
    node.reserve(1, 0)
    assert node.keys() == []
    node.mirror(1, 0, 4)
    second = node.reserve(1, 0)
    second.begin()
    assert node.registry.inventory() == [SlotInfo(1, 0, 2, 4, 64, pinned=False)]
    second.commit(5, b"{}", True, None)
    assert node.keys() == [(1, 0, 4), (1, 0, 5)]
    assert node.keys(pinned=True) == [(1, 0, 5)]


def test_complete_generation_drops_older_ones_except_pinned_versions(node: Node):
    for rank in (0, 1):
        node.mirror(1, rank, 4, pin=rank == 0)
        node.mirror(1, rank, 5)
    node.mirror(2, 0, 6)
    node.reserve(2, 0)
    node.registry.generation_complete(1)
    assert len(node.keys()) == 5
    node.registry.generation_complete(2)
    assert node.keys() == [(1, 0, 4), (2, 0, 6)]
    assert node.registry.usage()["spare"] > 0  # for the second buffers of all ranks
    node.registry.trim()
    assert node.registry.usage()["spare"] == 0
    node.registry.unpin(1, 4)
    assert node.keys() == [(2, 0, 6)]
    assert node.registry.usage()["spare"] > 0  # for the next one who needs a buffer


def test_next_generation_reuses_the_buffers_of_each_worker(node: Node):
    """Without new pages, and where the worker has them mapped."""

    def inode(writer: SlotWriter) -> int:
        [entry] = [
            entry
            for entry in node.registry._entries
            if read_header(entry.buffer.fd) == writer._header
        ]
        return os.fstat(entry.buffer.fd).st_ino

    old = {}
    for rank in (0, 1):
        for step in (4, 5):
            buffer = node.reserve(1, rank, owner=rank)
            write(buffer, rank, step)
            old[rank, step] = inode(buffer)
    new = {}
    node.registry.generation_loaded(2, 5)
    assert node.keys() == [(1, 0, 5), (1, 1, 5)], "the step that it started from stays"
    for rank, step in ((1, 6), (0, 6)):
        buffer = node.reserve(2, rank, owner=rank)
        write(buffer, rank, step)
        new[rank, 4] = inode(buffer)
    node.registry.generation_complete(2)
    for rank in (1, 0):
        buffer = node.reserve(2, rank, owner=rank)
        write(buffer, rank, 7)
        new[rank, 5] = inode(buffer)
    assert new == old
    assert node.registry.usage()["spare"] == 0


def test_loaded_generation_keeps_pinned_versions_and_replicas(node: Node):
    node.mirror(1, 0, 3, pin=True)
    node.mirror(1, 0, 4, 5)
    node.replica(1, 1, 3)
    node.registry.generation_loaded(2, 5)
    assert node.keys() == [(1, 0, 3), (1, 0, 5), (1, 1, 3)]


def test_unfinished_buffer_of_dead_worker_is_not_reused(node: Node):
    """Its device may still be writing it."""
    node.mirror(1, 0, 4)
    buffer = node.reserve(1, 0)
    buffer.begin()
    node.registry.discard_unfinished(7, dead=True)
    assert node.registry.usage()["spare"] == 0
    assert node.keys() == [(1, 0, 4)]
    buffer.data[:3] = b"dma"
    assert bytes(node.reserve(2, 0).data[:3]) == b"\0\0\0"


def test_unpinning_frees_up_to_step_and_keeps_versions(node: Node):
    buffers = node.mirror(1, 0, 4, 5, 6, pin=True)
    node.registry.unpin(1, 5)
    assert node.keys(pinned=True) == [(1, 0, 6)]
    assert node.keys() == [(1, 0, 4), (1, 0, 5), (1, 0, 6)]
    assert [buffer.pinned for buffer in buffers] == [False, False, True]
    node.registry.unpin(0, 9)  # a generation before
    assert buffers[2].pinned


def test_unfinished_buffers_become_spare_and_complete_versions_stay(node: Node):
    node.mirror(1, 0, 4)
    node.reserve(1, 0).begin()
    node.registry.discard_unfinished(8)
    assert node.registry.usage()["spare"] == 0
    node.registry.discard_unfinished(7)
    assert node.registry.usage()["spare"] > 0
    assert node.keys() == [(1, 0, 4)]


def test_latest_copy_of_version_is_read(node: Node):
    """A rank may salvage the complete state of a step whose shard it has mirrored."""
    node.mirror(1, 0, 4)
    write(node.reserve(1, 0, nbytes=512), 0, 4)
    with node.registry.open_pinned(refs((1, 0, 4))[0]) as fd:
        header = read_header(fd)
    assert header is not None
    assert header.data_bytes == 512


def test_version_that_is_read_is_not_reused(node: Node):
    node.mirror(1, 0, 4)
    [ref] = refs((1, 0, 4))
    with node.registry.open_pinned(ref) as fd:
        keep_only(node.registry)
        assert node.keys() == []
        assert node.registry.usage()["spare"] == 0  # the buffer is not reused yet
        MappedSlotReader(ref, fd).verify()
    assert node.registry.usage()["spare"] > 0
    with pytest.raises(SlotGoneError, match="generation 1, rank 0, step 4 on node a is gone"):
        node.registry.open_version(ref)


def test_version_overwritten_during_read_is_error(node: Node):
    [buffer] = node.mirror(1, 0, 4)
    with pytest.raises(SlotGoneError), node.registry.open_pinned(refs((1, 0, 4))[0]):
        write(buffer, 0, 5)


def test_replicas_of_older_generations_are_dropped_when_unpinned(node: Node):
    node.replica(1, 1, 4)
    node.mirror(2, 0, 6)
    node.registry.generation_complete(2)
    assert node.keys() == [(1, 1, 4), (2, 0, 6)]  # the newest that another node has of rank 1
    node.registry.let_go(2, 6)
    assert node.keys() == [(2, 0, 6)]


def test_unpinning_for_newer_generation_drops_older_ones(node: Node):
    node.mirror(1, 0, 3)
    node.registry.unpin(1, 4)
    assert node.keys() == [(1, 0, 3)]
    node.registry.unpin(2, 8)
    assert node.keys() == []
