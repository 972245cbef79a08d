"""The hostile faults of the soak benchmark: each takes effect on what it is aimed at."""

from __future__ import annotations

import gc
import os
import random
import socket
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from benchmarks import hostile
from benchmarks.store_attack import attack_stores, is_store, listening_sockets, owns
from rayzero.engine.checkpoint.catalogue import newest_complete
from rayzero.engine.checkpoint.verify import verify_checkpoint
from rayzero.workers import rendezvous_store
from rayzero.workers.rendezvous_store import AuthenticatedStore, ForgedKeyError, open_store
from rayzero.workers.vault.buffers import BufferPool
from rayzero.workers.vault.images import MappedSlotReader
from rayzero.workers.vault.mappings import SlotMapping
from rayzero.workers.vault.records import SlotDamagedError, SlotRef
from rayzero.workers.vault.slots import SlotHeader, SlotWriter, encode_index, write_header
from tests.engine.checkpoint.saving import save
from tests.workers.vault.support import table, write


def test_stranger_finds_a_store_and_forges_its_keys(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rendezvous_store, "UNCHECKED_WAIT_S", 0.1)
    server = open_store("127.0.0.1", 10.0)
    client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    store = AuthenticatedStore(client, b"s" * 32)
    for number in range(5):
        store.set(f"key {number}", "value")
    gc.collect()  # stores of earlier tests end
    report = attack_stores(lambda: [os.getpid()], 0.3, seed=1)
    assert ("127.0.0.1", server.port) in report.stores
    assert report.fired
    assert report.changed
    assert report.deleted
    with pytest.raises(ForgedKeyError):
        all(store.get(f"key {number}") for number in range(5))


def test_other_servers_are_no_stores():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        assert owns(os.getpid(), listening_sockets()[address])
        assert not is_store(address), "it accepts and stays silent"
    assert attack_stores(list, 0.01, seed=1).fired is False


@pytest.mark.parametrize("seed", range(3))
def test_flipped_bytes_of_a_slot_are_found(seed: int):
    """In its data, its index or its metadata."""
    text, pool = encode_index(table()), BufferPool()
    header = SlotHeader(1, 0, 1, len(text), table().nbytes)
    buffer = pool.acquire(header.nbytes)
    write_header(buffer.fd, header)
    write(SlotWriter(SlotMapping(buffer.fd), table()), 0, 5)
    ((path, found),) = hostile._newest_complete_slots([os.getpid()])[0]
    assert found.step == 5
    hostile._flip(path, found, random.Random(seed))
    image = MappedSlotReader(SlotRef(1, 0, 5, "a"), buffer.fd)
    with pytest.raises(SlotDamagedError, match=hostile.DETECTED):
        image.verify(), image.index(), image.metadata()
    image.close()
    pool.release([buffer])
    pool.trim()


@pytest.mark.parametrize("what", ["length", "header", "manifest"])
def test_damaged_checkpoint_is_unusable(tmp_path: Path, what: str):
    for step in (1, 2):
        save(tmp_path, step)
    newest = newest_complete(str(tmp_path))
    assert newest is not None
    assert newest.step == 2
    hostile._damage_checkpoint(newest, what, random.Random(1))
    assert any(problem.makes_unusable for problem in verify_checkpoint(newest.folder))
    remaining = newest_complete(str(tmp_path))
    assert remaining is not None
    assert remaining.step == (1 if what == "manifest" else 2)
