"""How long versions live, on one vault without a socket."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from rayzero.workers.vault.buffers import BufferPool
from rayzero.workers.vault.images import MappedSlotReader
from rayzero.workers.vault.records import SlotGoneError, SlotInfo
from rayzero.workers.vault.registry import SlotRegistry
from rayzero.workers.vault.slots import SlotWriter, encode_table, read_header, slot_geometry
from tests.workers.vault.support import PLENTY, keep_only, open_fds, refs, table, write

KEY = tuple[int, int, int]


class Desk:
    """A shelf, and its users."""

    def __init__(self) -> None:
        self.pool = BufferPool(lambda: PLENTY)
        self.shelf = SlotRegistry(self.pool)

    def reserve(
        self, generation: int, rank: int, count: int = 2, owner: int | None = None, nbytes: int = 64
    ) -> list[SlotWriter]:
        what = table(rank, nbytes)
        text = encode_table(what)
        fds = self.shelf.reserve(
            rank if owner is None else owner, generation, rank, 2, slot_geometry(what, text), count
        )
        buffers = [SlotWriter(fd, text) for fd in fds]
        for fd in fds:
            os.close(fd)
        return buffers

    def replica(self, generation: int, rank: int, step: int) -> None:
        """As if it had been copied from another node."""
        other = Desk()
        [buffer] = other.reserve(generation, rank, 1)
        write(buffer, rank, step, pin=True)
        [source] = other.shelf._entries
        header = read_header(source.buffer.fd)
        assert header is not None
        with self.shelf.receive_replica(header):
            pass
        other.shelf.close()

    def keys(self, *, pinned: bool | None = None, replica: bool | None = None) -> list[KEY]:
        return sorted(
            (one.generation, one.rank, one.step)
            for one in self.shelf.inventory()
            if pinned in (None, one.pinned) and replica in (None, one.replica)
        )


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.shelf.close()


def test_the_inventory_lists_what_is_whole(desk: Desk):
    first, second = desk.reserve(1, 0)
    assert desk.keys() == []
    write(first, 0, 4)
    second.begin()
    assert desk.shelf.inventory() == [SlotInfo(1, 0, 2, 4, 64, pinned=False)]
    second.commit(5, b"{}", True, None)
    assert desk.keys() == [(1, 0, 4), (1, 0, 5)]
    assert desk.keys(pinned=True) == [(1, 0, 5)]


def test_a_complete_generation_ends_those_before_but_for_their_pins(desk: Desk):
    for rank in (0, 1):
        first, second = desk.reserve(1, rank)
        write(first, rank, 4, pin=rank == 0)
        write(second, rank, 5)
    new = desk.reserve(2, 0)
    write(new[0], 0, 6)
    desk.shelf.generation_complete(1)
    assert len(desk.keys()) == 5
    desk.shelf.generation_complete(2)
    assert desk.keys() == [(1, 0, 4), (2, 0, 6)]
    assert desk.shelf.usage()["spare"] == 0
    desk.shelf.unpin(1, 4)
    assert desk.keys() == [(2, 0, 6)]
    assert desk.shelf.usage()["spare"] > 0  # for the next one who needs a buffer


def test_unpinning_frees_up_to_a_step_and_keeps_the_versions(desk: Desk):
    one = desk.reserve(1, 0, 3)
    for buffer, step in zip(one, (4, 5, 6), strict=True):
        write(buffer, 0, step, pin=True)
    desk.shelf.unpin(1, 5)
    assert desk.keys(pinned=True) == [(1, 0, 6)]
    assert desk.keys() == [(1, 0, 4), (1, 0, 5), (1, 0, 6)]
    assert [buffer.pinned for buffer in one] == [False, False, True]
    desk.shelf.unpin(0, 9)  # a generation before
    assert one[2].pinned


def test_what_was_dropped_is_used_again_and_grows(desk: Desk):
    first, second = desk.reserve(1, 0)
    write(first, 0, 4)
    write(second, 0, 5)
    held = desk.shelf.usage()["slots"]
    keep_only(desk.shelf, (1, 0, 5))
    assert desk.keys() == [(1, 0, 5)]
    assert desk.shelf.usage() == {"slots": held // 2, "replicas": 0, "spare": held // 2}
    [new] = desk.reserve(2, 0, 1, nbytes=100_000)
    assert desk.shelf.usage()["spare"] == 0
    assert (new.step, len(new.data)) == (-1, 100_000)
    write(new, 0, 6)
    assert desk.keys() == [(1, 0, 5), (2, 0, 6)]


def test_what_an_owner_left_unfinished_is_spare_and_what_is_whole_stays(desk: Desk):
    first, second = desk.reserve(1, 0, owner=7)
    write(first, 0, 4)
    second.begin()
    desk.shelf.discard_unfinished(8)
    assert desk.shelf.usage()["spare"] == 0
    desk.shelf.discard_unfinished(7)
    assert desk.shelf.usage()["spare"] > 0
    assert desk.keys() == [(1, 0, 4)]


def test_the_last_copy_of_a_version_is_the_one_that_is_found(desk: Desk):
    """A rank may save all of the state under a step of which its own part was mirrored."""
    [part] = desk.reserve(1, 0, 1)
    write(part, 0, 4)
    [everything] = desk.reserve(1, 0, 1, nbytes=512)
    write(everything, 0, 4)
    with desk.shelf.open_pinned(refs((1, 0, 4))[0]) as fd:
        header = read_header(fd)
    assert header is not None
    assert header.geometry.data_bytes == 512


def test_a_version_stays_as_it_is_while_it_is_read(desk: Desk):
    [buffer] = desk.reserve(1, 0, 1)
    write(buffer, 0, 4)
    [ref] = refs((1, 0, 4))
    with desk.shelf.open_pinned(ref) as fd:
        keep_only(desk.shelf)
        assert desk.keys() == []
        assert desk.shelf.usage()["spare"] == 0  # nobody else gets the buffer yet
        MappedSlotReader(ref, fd).verify()
    assert desk.shelf.usage()["spare"] > 0
    with pytest.raises(SlotGoneError, match="generation 1, rank 0, step 4 on node a is gone"):
        desk.shelf.open_version(ref)


def test_a_version_that_was_overwritten_while_it_was_read_is_an_error(desk: Desk):
    [buffer] = desk.reserve(1, 0, 1)
    write(buffer, 0, 4)
    with pytest.raises(SlotGoneError), desk.shelf.open_pinned(refs((1, 0, 4))[0]):
        write(buffer, 0, 5)


def test_an_older_replica_stays_until_it_is_unpinned_and_a_newer_is_there(desk: Desk):
    desk.replica(1, 0, 4)
    desk.shelf.unpin(1, 9)
    assert desk.keys(replica=True) == [(1, 0, 4)]  # there is no newer one
    desk.replica(1, 0, 8)
    assert desk.keys(replica=True) == [(1, 0, 4), (1, 0, 8)]
    desk.shelf.unpin(1, 4)
    assert desk.keys(replica=True) == [(1, 0, 8)]


def test_replicas_take_two_buffers_a_rank_at_most(desk: Desk):
    for step in (4, 8, 12):
        desk.replica(1, 0, step)
    assert desk.keys(replica=True) == [(1, 0, 8), (1, 0, 12)]
    usage = desk.shelf.usage()
    desk.replica(1, 0, 16)
    assert desk.shelf.usage() == usage


def test_a_replica_that_fails_leaves_the_older_one(desk: Desk):
    desk.replica(1, 0, 4)
    header = read_header(desk.shelf._entries[0].buffer.fd)
    assert header is not None
    with pytest.raises(RuntimeError), desk.shelf.receive_replica(header):
        raise RuntimeError
    assert desk.keys() == [(1, 0, 4)]
    assert desk.shelf.usage()["spare"] > 0


def test_replicas_of_older_generations_go_when_they_are_unpinned(desk: Desk):
    desk.replica(1, 1, 4)
    [mine] = desk.reserve(2, 0, 1)
    write(mine, 0, 6)
    desk.shelf.generation_complete(2)
    assert desk.keys() == [(1, 1, 4), (2, 0, 6)]  # the newest that another node has of rank 1
    desk.shelf.unpin(1, 4)
    assert desk.keys() == [(2, 0, 6)]


def test_a_vault_without_workers_learns_from_pins_that_a_generation_is_over(desk: Desk):
    [mine] = desk.reserve(1, 0, 1)
    write(mine, 0, 3)
    desk.shelf.unpin(1, 4)
    assert desk.keys() == [(1, 0, 3)]
    desk.shelf.unpin(2, 8)
    assert desk.keys() == []


def test_nothing_is_left_after_close():
    before = open_fds()
    desk = Desk()
    for generation in (1, 2):
        buffers = desk.reserve(generation, 0)
        write(buffers[0], 0, 1, pin=True)
        desk.replica(generation, 1, 1)
    keep_only(desk.shelf)
    del buffers
    desk.shelf.close()
    assert open_fds() == before
