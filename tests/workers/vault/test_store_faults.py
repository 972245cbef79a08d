"""Injected faults of the checkpoint store."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.chaos.spec import FaultFired, parse_fault
from rayzero.workers.vault.actor import VaultActor
from rayzero.workers.vault.slots import SlotWriter
from tests.workers.vault.support import VaultCluster, refs, steps_of, table, write


def start_vault(cluster: VaultCluster, folder: Path, *faults: str) -> tuple[VaultActor, SlotWriter]:
    """A vault with these faults that holds step 4, pinned, and a further buffer of the rank."""
    vault = cluster.vaults["a"] = VaultActor("job", "a", [*map(parse_fault, faults)], str(folder))
    client = cluster.client()
    write(client.reserve(1, 0, 1, table()), 0, 4, pin=True)
    return vault, client.reserve(1, 0, 1, table())


def test_full_disk_is_reported_and_retry_succeeds(cluster: VaultCluster, tmp_path: Path):
    """After as many failures as the fault says."""
    fault = "full_disk(step=4, times=2)"
    vault, _ = start_vault(cluster, tmp_path, fault, "kill(rank=0, step=1)")
    folder = tmp_path / "step-4"
    for times in (1, 2):
        with pytest.raises(StoreError, match="No space left on device") as caught:
            vault.write(str(folder), refs((1, 0, 4)))
        assert caught.value.kind == "full"
        assert FaultRecord(tmp_path).read() == (FaultFired(0, 4, fault),) * times
        assert vault.poll(0) == [FaultFired(0, 4, fault)]
        assert vault.poll(0) == []
    [file] = vault.write(str(folder), refs((1, 0, 4)))
    assert (folder / file.name).stat().st_size == file.nbytes


def test_fault_may_be_added_while_vault_runs(cluster: VaultCluster, tmp_path: Path):
    vault, _ = start_vault(cluster, tmp_path)
    vault.write(str(tmp_path / "step-4"), refs((1, 0, 4)))
    vault.inject([parse_fault("full_disk(step=1)")])
    with pytest.raises(StoreError):
        vault.write(str(tmp_path / "step-4"), refs((1, 0, 4)))


def test_slow_store_does_not_delay_mirrors(cluster: VaultCluster, tmp_path: Path):
    vault, buffer = start_vault(cluster, tmp_path, "slow_store(seconds=2)")
    folder = str(tmp_path / "step-4")
    writing = threading.Thread(target=vault.write, args=(folder, refs((1, 0, 4))))
    writing.start()
    for step in range(5, 9):
        write(buffer, 0, step)
        assert steps_of(vault) == [(0, 4), (0, step)]
    assert writing.is_alive(), "training must not wait for the store"
    writing.join(30)
    assert FaultRecord(tmp_path).read() == (FaultFired(0, 4, "slow_store(seconds=2)"),)
    assert any((tmp_path / "step-4").iterdir())
