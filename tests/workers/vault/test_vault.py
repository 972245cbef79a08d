"""Checkpoint files, faults of their store, inspection of processes, and imports of a vault."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.manifest import RankFile
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.chaos.spec import FaultFired, parse_fault
from rayzero.workers.vault import peers
from rayzero.workers.vault import vault as vault_module
from rayzero.workers.vault.actor import VAULT_CALL_THREADS, VaultActor
from rayzero.workers.vault.records import SlotDamagedError, SlotGoneError
from rayzero.workers.vault.slots import SlotWriter
from tests.workers.vault.support import (
    ROOT,
    VaultCluster,
    content,
    damage,
    keep_only,
    refs,
    steps_of,
    table,
    worker_process,
    write,
)

LIMIT_S = 60.0


def call_while_writing(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    write_file = vault_module.write_rank_file

    def write_beside(*arguments: Any, **named: Any) -> RankFile:
        act()
        return write_file(*arguments, **named)

    monkeypatch.setattr(vault_module, "write_rank_file", write_beside)


def test_files_hold_pinned_versions(
    cluster: VaultCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    vault, folder = cluster.vault(), tmp_path / "step-50"
    for rank in (0, 1):
        buffer = cluster.client(worker=rank).reserve(3, rank, 2, table(rank))
        write(buffer, rank, 50, pin=True)
    # A version dropped meanwhile is still written.
    call_while_writing(monkeypatch, lambda: keep_only(vault._registry, (3, 1, 50)))
    files = vault.write(str(folder), refs((3, 0, 50), (3, 1, 50)))
    assert [file.rank for file in files] == [0, 1]
    for rank, file in enumerate(files):
        assert (folder / file.name).read_bytes().endswith(content(rank, 50))
        assert (file.block_index, file.metadata) == (table(rank), {"step": 50, "rank": rank})
    assert steps_of(vault) == [(1, 50)]


def test_damaged_and_overwritten_versions_do_not_become_checkpoints(
    cluster: VaultCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    vault = cluster.vault()
    buffer = cluster.client().reserve(1, 0, 1, table())
    write(buffer, 0, 4)
    damage(vault, refs((1, 0, 4))[0], lambda image: image.header.data_offset)
    with pytest.raises(SlotDamagedError):
        vault.write(str(tmp_path / "damaged"), refs((1, 0, 4)))
    assert not (tmp_path / "damaged").exists()
    write(buffer, 0, 4)
    call_while_writing(monkeypatch, lambda: write(buffer, 0, 5))  # it is not pinned
    with pytest.raises(SlotGoneError):
        vault.write(str(tmp_path / "overwritten"), refs((1, 0, 4)))


def test_hanging_store_blocks_only_its_writer(
    cluster: VaultCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With as many calls as the vault has threads, polls are still answered."""
    monkeypatch.setattr(vault_module, "STORE_WAIT_S", 0.01)
    answers = Event()
    call_while_writing(monkeypatch, answers.wait)
    vault, folder = cluster.vault(), str(tmp_path / "step-4")
    buffer = cluster.client().reserve(1, 0, 1, table())
    write(buffer, 0, 4, pin=True)
    with ThreadPoolExecutor(VAULT_CALL_THREADS) as threads:
        attempts = [
            threads.submit(vault.write, folder, refs((1, 0, 4))) for _ in range(VAULT_CALL_THREADS)
        ]
        try:
            assert threads.submit(vault.poll, 0.0).result(LIMIT_S) == []
        finally:
            answers.set()
        errors = [attempt.exception(LIMIT_S) for attempt in attempts]
    store_errors = [error for error in errors if isinstance(error, StoreError)]
    assert {error.kind for error in store_errors} == {"slow"}
    assert len(vault.write(folder, refs((1, 0, 4)))) == 1  # later calls succeed


def test_usage_counts_every_buffer(cluster: VaultCluster):
    vault = cluster.vault(available=lambda: 2**33)
    assert vault.usage() == {"slots": 0, "replicas": 0, "spare": 0, "available": 2**33}
    buffer = cluster.client().reserve(1, 0, 1, table(nbytes=2**20))
    write(buffer, 0, 4)
    assert 2**20 < vault.usage()["slots"] < 2**20 + 2**19
    keep_only(vault._registry)
    assert 2**20 < vault.usage()["spare"] < 2**20 + 2**19


def test_killed_process_runs_until_it_has_exited(cluster: VaultCluster):
    with subprocess.Popen(["sleep", "60"]) as process:
        assert cluster.vault().runs(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not cluster.vault().runs(process.pid), "a zombie holds no memory"
    assert not cluster.vault().runs(process.pid)


def test_stopped_process_is_inspected(cluster: VaultCluster):
    with worker_process("connect", cluster.vault().address()) as worker:
        assert re.match(rf"process {worker.pid}: [SR] ", cluster.vault().inspect(worker.pid))
        os.kill(worker.pid, signal.SIGSTOP)
        os.waitpid(worker.pid, os.WUNTRACED)
        text = cluster.vault().inspect(worker.pid)
        assert text.startswith(f"process {worker.pid}: T (stopped)")
        assert "print_and_wait" in text or "no stacks: " in text
        assert cluster.vault().kill(worker.pid)
        assert worker.wait(10) == -9
        text = cluster.vault().inspect(worker.pid)
        assert text == f"process {worker.pid} does not exist"


@pytest.mark.parametrize(
    ("script", "answer"),
    [
        ("echo 'Thread 1 (idle)'", "Thread 1 (idle)"),
        (
            "printf 'Process 7\\nThread 7 (idle): \"MainThread\"\\n  a\\n'\n"
            "printf 'Thread 8 (active): \"rayzero-train\"\\n  b\\n'",
            'Thread 8 (active): "rayzero-train"\n  b',
        ),
        ("echo 'Permission denied' >&2; exit 1", "no stacks: Permission denied"),
        ("exec sleep 99", "no stacks: "),
    ],
)
def test_stacks_come_from_py_spy_in_limited_time(
    script: str, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tool = tmp_path / "py-spy"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(peers, "_STACK_TIMEOUT_S", 0.3 if "sleep" in script else 60.0)
    started = time.monotonic()
    text = peers.inspect_process(os.getpid())
    assert answer in text
    assert "MainThread" not in text, "only the training thread's, if there is one"
    assert time.monotonic() - started < 60.0


def test_without_py_spy_state_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    text = peers.inspect_process(os.getpid())
    assert "(running)" in text or "(sleeping)" in text
    assert "py-spy is not installed" in text


def test_imports_of_vaults():
    """The vault's modules load none of torch, Ray and pyarrow; Ray's actor no torch."""
    script = (
        "import importlib, pkgutil, sys, rayzero.workers.vault as vault\n"
        "for module in pkgutil.iter_modules(vault.__path__):\n"
        "    if module.name == 'actor': continue\n"
        "    importlib.import_module(f'rayzero.workers.vault.{module.name}')\n"
        "loaded = {'torch', 'ray', 'pyarrow'} & set(sys.modules)\n"
        "import rayzero.workers.vault.actor\n"
        "loaded |= {'torch'} & set(sys.modules)\n"
        "sys.exit(repr(loaded) if loaded else 0)\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_vault_does_not_make_the_jobs_folder(cluster: VaultCluster, tmp_path: Path):
    """Without its lease a folder that was removed would be taken for the job's."""
    buffer = cluster.client().reserve(1, 0, 1, table())
    write(buffer, 0, 4, pin=True)
    with pytest.raises(StoreError, match="the job's folder does not exist on this node"):
        cluster.vault().write(str(tmp_path / "job" / "step-4"), refs((1, 0, 4)))
    assert list(tmp_path.iterdir()) == []


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
