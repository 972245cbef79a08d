"""Reading a state from a vault on this or another node."""

from __future__ import annotations

from typing import Any

import pytest

from rayzero.engine.errors import DataError
from rayzero.engine.layout.state_index import StateSource
from rayzero.workers.vault import images
from rayzero.workers.vault.records import (
    Restore,
    SlotDamagedError,
    SlotGoneError,
)
from rayzero.workers.vault.slots import PAGE_BYTES
from tests.workers.vault.support import (
    VaultCluster,
    content,
    damage,
    keep_only,
    open_fds,
    refs,
    table,
    wait_for_fds,
    write,
)

NODES = pytest.mark.parametrize("node", ["a", "b"])


def store(
    cluster: VaultCluster, node: str, ranks: int = 2, step: int = 4, check: bool = True
) -> Restore:
    """The state of `ranks` ranks in a node's vault."""
    for rank in range(ranks):
        buffer = cluster.client(node, rank).reserve(1, rank, ranks, table(rank))
        write(buffer, rank, step, check=check)
    return Restore(step, tuple(refs(*((1, rank, step) for rank in range(ranks)), node=node)))


def read(source: StateSource, block: int, offset: int = 0, length: int = 64) -> bytes:
    data = bytearray(length)
    source.read(block, offset, memoryview(data))
    return bytes(data)


@NODES
def test_state_is_read_in_any_ranges(cluster: VaultCluster, node: str):
    source = cluster.client(worker=9).open_source(store(cluster, node))
    assert source.step == 4
    assert list(source.block_indexes) == [table(0), table(1)]
    assert source.metadata(1) == {"step": 4, "rank": 1}
    assert source.metadata(5) == {"step": 4, "rank": 0}  # no such rank existed
    for block in (0, 1):
        for offset, length in ((0, 64), (63, 1), (10, 20), (64, 0)):
            expected = content(block, 4)[offset : offset + length]
            assert read(source, block, offset, length) == expected
    for offset, length in ((60, 5), (-1, 2)):
        with pytest.raises(DataError, match="0 to 64"):
            read(source, 0, offset, length)
    source.close()
    source.close()


@NODES
def test_damaged_data_is_reported(cluster: VaultCluster, node: str):
    restore = store(cluster, node)
    damage(cluster.vault(node), restore.slots[1], lambda image: image.header.data_offset + 9)
    client = cluster.client(worker=9)
    name = f"generation 1, rank 1, step 4 on node {node} is damaged: its data"
    if node == "b":  # its vault gives nothing of it away
        with pytest.raises(SlotDamagedError, match=name):
            client.open_source(restore)
        return
    source = client.open_source(restore)
    assert read(source, 0) == content(0, 4)
    with pytest.raises(SlotDamagedError, match=name):
        read(source, 1)
    source.close()


def test_data_is_verified_once_when_read(cluster: VaultCluster, monkeypatch: pytest.MonkeyPatch):
    restore = store(cluster, "a")
    compared = []
    monkeypatch.setattr(
        images.MappedSlotReader, "verify", lambda self: compared.append(self.ref.rank), raising=True
    )
    source = cluster.client(worker=9).open_source(restore)
    assert compared == []
    for _ in range(3):
        read(source, 1)
    assert compared == [1]
    source.close()


def test_data_without_checksums_is_not_verified(cluster: VaultCluster):
    restore = store(cluster, "a", check=False)
    damage(cluster.vault("a"), restore.slots[0], lambda image: image.header.data_offset)
    assert read(cluster.client("a").open_source(restore), 0) != content(0, 4)


@NODES
@pytest.mark.parametrize("part", ["its metadata", "its index"])
def test_tables_and_metadata_are_always_verified(cluster: VaultCluster, node: str, part: str):
    restore = store(cluster, node, check=False)

    def where(image: images.SlotReader) -> int:
        return PAGE_BYTES if part == "its index" else image.header.metadata_offset

    damage(cluster.vault(node), restore.slots[0], where)
    client = cluster.client(worker=9)
    before = open_fds()
    with pytest.raises(SlotDamagedError, match=part):
        client.open_source(restore)
    wait_for_fds(before)


@NODES
def test_missing_version_is_named(cluster: VaultCluster, node: str):
    restore = store(cluster, node)
    kept = restore.slots[0]
    keep_only(cluster.vault(node)._registry, (kept.generation, kept.rank, kept.step))
    with pytest.raises(SlotGoneError, match=f"rank 1, step 4 on node {node} is gone"):
        cluster.client(worker=9).open_source(restore)


def test_restore_without_slots_is_error(cluster: VaultCluster):
    with pytest.raises(DataError, match="no vault slot"):
        cluster.client().open_source(Restore(4))


def test_limit_of_the_first_chunk_grows_with_the_image(
    cluster: VaultCluster, monkeypatch: pytest.MonkeyPatch
):
    """The other vault verifies all of it before it answers: hundreds of GB may take a minute."""
    monkeypatch.setattr(images, "VERIFY_S_PER_BYTE", 1e-3)
    buffer = cluster.client("b").reserve(1, 0, 1, table(nbytes=1_000_000))
    write(buffer, 0, 4)
    client, limits_s = cluster.client(), list[float]()
    call = client._call

    def record(limit_s: float, method: Any, *arguments: Any) -> Any:
        if method.__name__ == "fetch_version":
            limits_s.append(limit_s)
        return call(limit_s, method, *arguments)

    monkeypatch.setattr(client, "_call", record)
    client.open_source(Restore(4, tuple(refs((1, 0, 4), node="b")))).close()
    header_s, first_chunk_s, *_ = limits_s
    assert header_s < 100
    assert first_chunk_s > 1000


def test_another_nodes_chunks_are_fetched_once(
    cluster: VaultCluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(images, "FETCH_CHUNK_BYTES", 300_000)
    nbytes = 1_000_000
    buffer = cluster.client("b").reserve(1, 0, 1, table(nbytes=nbytes))
    write(buffer, 0, 4)
    source = cluster.client().open_source(Restore(4, tuple(refs((1, 0, 4), node="b"))))
    start = len(cluster.fetched)
    data = b"".join(read(source, 0, position, 1000) for position in range(0, nbytes, 1000))
    assert data == content(0, 4, nbytes)
    assert read(source, 0, 0, nbytes) == data  # longer than a chunk
    lengths = [length for _, _, length in cluster.fetched[start:]]
    assert len(lengths) <= 2 * (nbytes // 300_000 + 1)
    source.close()
