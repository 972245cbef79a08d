from __future__ import annotations

import gc
import mmap
import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any

import pytest

from rayzero.engine.errors import DataError, EngineError
from rayzero.workers.vault import client as client_module
from rayzero.workers.vault.client import VaultClient
from rayzero.workers.vault.records import Restore, VaultGoneError, VaultMemoryError
from rayzero.workers.vault.registry import SlotRegistry
from rayzero.workers.vault.requests import WorkerRequests
from tests.workers.vault.support import (
    VaultCluster,
    open_fds,
    refs,
    table,
    wait_for_fds,
    write,
)


def test_memory_error_reaches_worker(cluster: VaultCluster):
    cluster.vault(available=lambda: 2**20)
    with pytest.raises(VaultMemoryError, match="the 1 MiB that are available"):
        cluster.client().reserve(1, 0, 1, table(nbytes=2**20))
    assert cluster.client().reserve(1, 0, 1, table()).step == -1


def test_mapping_stays_registered_across_generations(cluster: VaultCluster):
    """Until its buffer is not needed any more, and not while a device writes to it."""
    client, log = cluster.client(), []

    def register(memory: mmap.mmap) -> Callable[[], None]:
        log.append("register")
        return lambda: log.append("unregister")

    old = []
    for step in (4, 5):
        old.append(client.reserve(1, 0, 1, table()))
        client.register(old[-1].mapping, register)
        write(old[-1], 0, step)
    mappings = [writer.mapping for writer in old]
    del old
    source = client.open_source(Restore(5, tuple(refs((1, 0, 5)))))
    block = source.registered_block(0)
    assert block is not None
    source.verify(0)
    assert block.obj is mappings[1].memory  # copies to the device need no other mapping
    del block
    source.close()
    client.announce_loaded(2, 5)
    first = client.reserve(2, 0, 1, table())
    client.register(first.mapping, register)
    assert first.mapping is mappings[0]
    assert log == ["register", "register"]
    write(first, 0, 6)
    client.announce_complete(2)
    second = client.reserve(2, 0, 1, table(nbytes=100_000))  # another state: the buffer has grown
    client.register(second.mapping, register)
    assert second.mapping is not mappings[1]
    mappings[1].is_busy = iter([True, False]).__next__
    client.release_spares([first, second])
    assert log == ["register", "register", "register", "unregister"]
    assert not mappings[1].registered
    client.close()
    assert log.count("unregister") == 3


def test_buffer_that_a_device_still_writes_is_not_given_back(
    cluster: VaultCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(client_module, "_DEVICE_TIMEOUT_S", 0.01)
    client = cluster.client()
    writer = client.reserve(1, 0, 1, table())
    client.register(writer.mapping, lambda memory: lambda: None)
    writer.begin()
    writer.mapping.is_busy = lambda: True
    with pytest.raises(EngineError, match=r"has not ended after 0\.01 s"):
        client.reserve(2, 0, 1, table())
    client.close()
    assert "stays registered" in caplog.text


def test_lost_vault_is_an_error_and_memory_stays_mapped(cluster: VaultCluster):
    client = cluster.client()
    buffer = client.reserve(1, 0, 1, table())
    cluster.vault().close()
    with pytest.raises(VaultGoneError):
        client.reserve(1, 0, 1, table())
    with pytest.raises(VaultGoneError):
        client.announce_complete(1)
    write(buffer, 0, 1)  # the memory is still mapped
    assert buffer.step == 1
    client.close()
    client.close()
    with pytest.raises(VaultGoneError, match="no vault answers"):
        VaultClient(cluster.vault().address(), 0)


def test_close_ends_waiting_call(cluster: VaultCluster):
    before, may_reply = open_fds("rayzero-slot"), threading.Event()
    cluster.vault(available=lambda: 2**40 if may_reply.wait(60) else 0)
    client = cluster.client()
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(client.reserve, 1, 0, 1, table())
        time.sleep(0.05)
        client.close()
        with pytest.raises(VaultGoneError):
            call.result(client_module._RESERVE_TIMEOUT_S / 2)
    may_reply.set()
    cluster.vault().close()
    wait_for_fds(before, "rayzero-slot")


def test_late_reply_is_discarded(cluster: VaultCluster):
    """Its buffers are closed."""
    gc.collect()  # earlier tests' mappings in this process
    before = open_fds("rayzero-slot")
    may_reply = threading.Event()
    cluster.vault(available=lambda: 2**40 if may_reply.wait(60) else 0)
    client = cluster.client()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_module, "_RESERVE_TIMEOUT_S", 0.0)
        with pytest.raises(VaultGoneError, match="timed out"):
            client.reserve(1, 0, 1, table(nbytes=10))
    may_reply.set()
    assert select.select([client._socket], [], [], 60)[0], "its late reply"
    buffer = client.reserve(1, 0, 1, table(nbytes=20))
    assert len(buffer.data) == 20
    del buffer
    client.close()
    cluster.vault().close()
    wait_for_fds(before, "rayzero-slot")


def test_worker_that_does_not_wait_for_a_late_registration_is_not_lost(
    cluster: VaultCluster, monkeypatch: pytest.MonkeyPatch
):
    asked, may_reply, register = threading.Event(), threading.Event(), WorkerRequests.register

    @wraps(register)
    def late(requests: WorkerRequests, *arguments: Any) -> list[int]:
        asked.set()
        assert may_reply.wait(60)
        return register(requests, *arguments)

    monkeypatch.setattr(WorkerRequests, "register", late)
    monkeypatch.setattr(client_module, "_CALL_TIMEOUT_S", 1.0)
    vault = cluster.vault()
    with pytest.raises(VaultGoneError, match="timed out"):
        VaultClient(vault.address(), 0)
    assert asked.is_set()
    may_reply.set()
    assert vault.poll(0.2) == []
    assert vault._server._peers == []


def test_calls_of_several_threads_do_not_mix(cluster: VaultCluster):
    client, steps = cluster.client(), range(1, 30)
    for step in steps:
        buffer = client.reserve(1, 0, 1, table(nbytes=step))
        write(buffer, 0, step)

    def size(step: int) -> int:
        client.announce_complete(0)
        source = client.open_source(Restore(step, tuple(refs((1, 0, step)))))
        source.close()
        return source.block_indexes[0].nbytes

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(size, steps)) == list(steps)


def test_no_descriptors_stay_open(cluster: VaultCluster):
    for _ in range(2):  # the first round opens what the process keeps, such as numpy's files
        before = open_fds()
        inner = VaultCluster()
        for worker in range(3):
            client = inner.client(worker=worker)
            for step in (1, 2):
                write(client.reserve(1, worker, 3, table(worker)), worker, step, pin=True)
        inner.vault("b").replicate(refs((1, 0, 1), (1, 1, 2)))
        inner.close()
    wait_for_fds(before)


def test_error_of_vault_is_raised_at_worker(cluster: VaultCluster, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise OSError("a disk")

    monkeypatch.setattr(SlotRegistry, "reserve", fail)
    with pytest.raises(DataError, match="OSError: a disk"):
        cluster.client().reserve(1, 0, 1, table())
