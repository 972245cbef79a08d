"""A store that fails where a fault says so."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.chaos.spec import FaultFired
from rayzero.workers.vault.background import FaultInjectingStore
from tests.workers.vault.support import VaultCluster, refs, steps_of, table, write


def stored(cluster: VaultCluster, store: FaultInjectingStore) -> Any:
    """A vault that writes through it, and a buffer with step 4 in it."""
    vault = cluster.vault(write_file=store.write)
    buffers = cluster.client().reserve(1, 0, 1, table(), 2)
    write(buffers[0], 0, 4, pin=True)
    return vault, buffers


def test_a_full_disk_is_told_as_a_real_one_and_the_next_try_is_whole(
    cluster: VaultCluster, tmp_path: Path
):
    store = FaultInjectingStore(["full_disk(step=4)", "kill(rank=0, step=1)"], str(tmp_path))
    vault, _ = stored(cluster, store)
    folder = tmp_path / "step-4"
    with pytest.raises(StoreError, match="No space left on device") as caught:
        vault.write(str(folder), refs((1, 0, 4)))
    assert caught.value.kind == "full"
    assert FaultRecord(tmp_path).read() == (FaultFired(0, 4, "full_disk(step=4)"),)
    assert store.pop_fired() == [FaultFired(0, 4, "full_disk(step=4)")]
    assert store.pop_fired() == []
    [file] = vault.write(str(folder), refs((1, 0, 4)))
    assert (folder / file.name).stat().st_size == file.nbytes


def test_a_fault_may_come_while_the_vault_runs(cluster: VaultCluster, tmp_path: Path):
    store = FaultInjectingStore((), str(tmp_path))
    vault, _ = stored(cluster, store)
    vault.write(str(tmp_path / "step-4"), refs((1, 0, 4)))
    store.set_faults(["full_disk(step=1)"])
    with pytest.raises(StoreError):
        vault.write(str(tmp_path / "step-4"), refs((1, 0, 4)))


def test_a_slow_store_keeps_nobody_from_mirroring(cluster: VaultCluster, tmp_path: Path):
    store = FaultInjectingStore(["slow_store(seconds=600)"], str(tmp_path))
    vault, buffers = stored(cluster, store)
    folder = str(tmp_path / "step-4")
    writing = threading.Thread(target=vault.write, args=(folder, refs((1, 0, 4))))
    writing.start()
    for step in range(5, 9):
        write(buffers[1], 0, step)
        assert steps_of(vault) == [(0, 4), (0, step)]
    assert writing.is_alive(), "it waits behind training"
    store.close()
    writing.join(10)
    assert FaultRecord(tmp_path).read() == (FaultFired(0, 4, "slow_store(seconds=600)"),)
    assert any((tmp_path / "step-4").iterdir())
