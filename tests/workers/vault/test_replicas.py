"""Replicas of versions on other nodes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from rayzero.workers.vault import images
from rayzero.workers.vault.actor import VAULT_CALL_THREADS
from rayzero.workers.vault.records import (
    Restore,
    SlotDamagedError,
    SlotGoneError,
    SlotInfo,
    SlotRef,
    VaultGoneError,
)
from tests.workers.vault.support import (
    VaultCluster,
    content,
    damage,
    keep_only,
    refs,
    steps_of,
    table,
    write,
)

LIMIT_S = 60.0


def pinned(cluster: VaultCluster, step: int, rank: int = 0, nbytes: int = 64) -> list[SlotRef]:
    """A rank's pinned version in vault a."""
    buffer = cluster.client("a", rank).reserve(1, rank, 2, table(rank, nbytes))
    write(buffer, rank, step, pin=True)
    return refs((1, rank, step))


def test_hanging_copy_blocks_only_first_callers(cluster: VaultCluster):
    """With as many calls as the vault has threads, polls still return."""
    resumed = Event()
    cluster.on_fetch = lambda ref, offset: resumed.wait(LIMIT_S)
    slots, vault = pinned(cluster, 4), cluster.vault("b")
    with ThreadPoolExecutor(VAULT_CALL_THREADS) as threads:
        attempts = [threads.submit(vault.replicate, slots) for _ in range(VAULT_CALL_THREADS)]
        try:
            assert threads.submit(vault.poll, 0.0).result(LIMIT_S) == []
        finally:
            resumed.set()
        errors = [attempt.exception(LIMIT_S) for attempt in attempts]
    assert {type(error) for error in errors if error is not None} == {VaultGoneError}
    assert steps_of(vault) == [(0, 4)]
    assert vault.replicate(slots) == 0  # later calls succeed


def test_replica_equals_version(cluster: VaultCluster):
    slots = pinned(cluster, 4, 0) + pinned(cluster, 4, 1)
    vault = cluster.vault("b")
    assert vault.replicate(slots) > 2 * 64
    assert sorted(vault.inventory(), key=lambda slot: slot.rank) == [
        SlotInfo(1, rank, 2, 4, 64, pinned=False, replica=True) for rank in (0, 1)
    ]
    assert vault.usage()["replicas"] > 0
    cluster.vaults["a"].close()
    restore = Restore(4, tuple(refs((1, 0, 4), (1, 1, 4), node="b")))
    source = cluster.client("b").open_source(restore)
    data = bytearray(64)
    source.read(1, 0, memoryview(data))
    assert (bytes(data), source.metadata(1)) == (content(1, 4), {"step": 4, "rank": 1})
    assert source.block_indexes[1] == table(1)
    source.close()
    count = len(cluster.fetched)
    assert vault.replicate(slots) == 0
    assert len(cluster.fetched) == count, "it is not copied again"
    assert cluster.vault("c").replicate(refs((1, 0, 4), node="b")) > 0, "of a replica"
    assert steps_of(cluster.vault("c")) == [(0, 4)]


def test_older_replica_stays_until_new_one_is_complete(
    cluster: VaultCluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(images, "FETCH_CHUNK_BYTES", 10_000)
    vault = cluster.vault("b")
    vault.replicate(pinned(cluster, 4, nbytes=50_000))
    vault._registry.let_go(1, 5)
    seen = []
    cluster.on_fetch = lambda ref, offset: seen.append(steps_of(vault))
    vault.replicate(pinned(cluster, 8, nbytes=50_000))
    assert len(seen) > 5
    assert set(map(tuple, seen)) == {((0, 4),)}
    vault._registry.let_go(1, 8)
    assert steps_of(vault) == [(0, 8)]


def test_memory_for_replicas_stays_bounded(cluster: VaultCluster):
    vault = cluster.vault("b")
    usages = []
    for step in range(4, 40, 4):
        vault.replicate(pinned(cluster, step))
        vault._registry.let_go(1, step)
        usages.append(sum(vault.usage()[kind] for kind in ("slots", "replicas", "spare")))
    assert len(set(usages[1:])) == 1
    assert steps_of(vault) == [(0, 36)]


def test_damage_in_transit_is_detected(cluster: VaultCluster, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(images, "FETCH_CHUNK_BYTES", 200_000)  # two chunks, the data in the second
    slots = pinned(cluster, 4)
    vault = cluster.vault("b")
    vault.replicate(slots)
    newer = pinned(cluster, 8)
    # The source vault verifies the data before it sends the first byte.
    cluster.on_fetch = lambda ref, offset: (
        offset and damage(cluster.vaults["a"], newer[0], lambda image: image.header.data_offset)
    )
    with pytest.raises(SlotDamagedError, match="rank 0, step 8 on node a is damaged: its data"):
        vault.replicate(newer)
    assert steps_of(vault) == [(0, 4)]


def test_version_dropped_during_copy_leaves_older_replica(
    cluster: VaultCluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(images, "FETCH_CHUNK_BYTES", 10_000)
    vault = cluster.vault("b")
    vault.replicate(pinned(cluster, 4, nbytes=50_000))
    newer = pinned(cluster, 8, nbytes=50_000)

    def lose(ref: SlotRef, offset: int) -> None:
        if offset > 20_000:
            keep_only(cluster.vaults["a"]._registry)

    cluster.on_fetch = lose
    with pytest.raises(SlotGoneError, match="step 8"):
        vault.replicate(newer)
    assert steps_of(vault) == [(0, 4)]
    assert vault.usage()["spare"] > 0


def test_closing_vault_ends_copy(cluster: VaultCluster, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(images, "FETCH_CHUNK_BYTES", 10_000)
    slots = pinned(cluster, 4, nbytes=100_000)
    vault, closing = cluster.vault("b"), threading.Event()

    def close(ref: SlotRef, offset: int) -> None:
        if offset > 20_000 and not closing.is_set():
            closing.set()
            vault.close()

    cluster.on_fetch = close
    with pytest.raises(VaultGoneError, match="closing"):
        vault.replicate(slots)
    assert len(cluster.fetched) < 6
