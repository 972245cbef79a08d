from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from rayzero.engine.errors import DataError
from rayzero.workers.vault import client as client_module
from rayzero.workers.vault.client import VaultClient
from rayzero.workers.vault.protocol import (
    JsonLineDecoder,
    abstract_socket_name,
    decode_error,
    encode_error,
    encode_message,
)
from rayzero.workers.vault.records import Restore, VaultGoneError, VaultMemoryError
from tests.workers.vault.support import (
    VaultCluster,
    open_fds,
    refs,
    steps_of,
    table,
    wait_for_fds,
    write,
)


def test_buffers_are_empty_apart_and_of_the_tables_size(cluster: VaultCluster):
    first, second = cluster.client().reserve(1, 0, 1, table(nbytes=1000), 2)
    first.begin()
    first.data[:] = b"a" * 1000
    assert len(second.data) == 1000
    assert bytes(second.data) == b"\0" * 1000
    assert (first.step, second.step) == (-1, -1)


def test_too_little_memory_reaches_the_worker_as_it_is(cluster: VaultCluster):
    cluster.vault(available=lambda: 2**20)
    with pytest.raises(VaultMemoryError) as caught:
        cluster.client().reserve(1, 0, 1, table(nbytes=2**20), 2)
    assert caught.value.available_bytes == 2**20
    assert caught.value.needed_bytes > 2**21
    assert len(cluster.client().reserve(1, 0, 1, table(), 1)) == 1


def test_complete_waits_for_nothing_and_ends_older_generations(cluster: VaultCluster):
    vault, client = cluster.vault(), cluster.client()
    [old] = client.reserve(1, 0, 1, table(), 1)
    write(old, 0, 4)
    [new] = client.reserve(2, 0, 1, table(), 1)
    write(new, 0, 5)
    assert steps_of(vault) == [(0, 4), (0, 5)]
    client.announce_complete(2)
    client.reserve(2, 0, 1, table(), 1)  # answered after what was said before
    assert steps_of(vault) == [(0, 5)]


def test_a_vault_that_is_gone_is_an_error_that_can_be_survived(cluster: VaultCluster):
    client = cluster.client()
    [buffer] = client.reserve(1, 0, 1, table(), 1)
    cluster.vault().close()
    with pytest.raises(VaultGoneError):
        client.reserve(1, 0, 1, table(), 1)
    with pytest.raises(VaultGoneError):
        client.announce_complete(1)
    write(buffer, 0, 1)  # the memory is still there
    assert buffer.step == 1
    client.close()
    client.close()
    with pytest.raises(VaultGoneError, match="no vault answers"):
        VaultClient(cluster.vault().address(), 0)


@contextmanager
def silent_vault(answers: int) -> Iterator[str]:
    """Answers so many requests, and then no more."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(abstract_socket_name("@rayzero-silent"))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            kept.append(connection)
            for number in range(1, answers + 1):
                connection.recv(4096)
                connection.sendall(encode_message({"id": number, "fds": 0, "value": "a"}))

        kept: list[socket.socket] = []
        thread = threading.Thread(target=serve)
        thread.start()
        yield "@rayzero-silent"
        thread.join(5.0)
        for one in kept:
            one.close()


def test_every_call_has_a_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client_module, "_RESERVE_TIMEOUT_S", 0.1)
    with silent_vault(answers=1) as address:
        client = VaultClient(address, 0)
        with pytest.raises(VaultGoneError, match="timed out"):
            client.reserve(1, 0, 1, table(), 1)
        client.close()


def test_close_frees_a_call_that_waits():
    with silent_vault(answers=1) as address, ThreadPoolExecutor(1) as threads:
        client = VaultClient(address, 0)
        call = threads.submit(client.reserve, 1, 0, 1, table(), 1)
        time.sleep(0.05)
        client.close()
        with pytest.raises(VaultGoneError):
            call.result(client_module._RESERVE_TIMEOUT_S / 2)


def test_a_late_reply_is_not_taken_for_that_of_another_call(cluster: VaultCluster):
    """Its buffers are closed."""
    may_reply = threading.Event()
    cluster.vault(available=lambda: 2**40 if may_reply.wait(60) else 0)
    client = cluster.client()
    before = open_fds()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_module, "_RESERVE_TIMEOUT_S", 0.0)
        with pytest.raises(VaultGoneError):
            client.reserve(1, 0, 1, table(nbytes=10), 3)
    may_reply.set()
    [buffer] = client.reserve(1, 0, 1, table(nbytes=20), 1)
    assert len(buffer.data) == 20
    del buffer
    client.close()
    cluster.vault().close()
    wait_for_fds(before)


def test_calls_of_several_threads_do_not_mix(cluster: VaultCluster):
    client, steps = cluster.client(), range(1, 30)
    for step in steps:
        [buffer] = client.reserve(1, 0, 1, table(nbytes=step), 1)
        write(buffer, 0, step)

    def size(step: int) -> int:
        client.announce_complete(0)
        source = client.open_source(Restore(step, tuple(refs((1, 0, step)))))
        source.close()
        return source.block_indexes[0].nbytes

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(size, steps)) == list(steps)


def test_nothing_is_left_open(cluster: VaultCluster):
    for _ in range(2):  # the first round opens what the process keeps, such as numpy's files
        before = open_fds()
        inner = VaultCluster()
        for worker in range(3):
            client = inner.client(worker=worker)
            for buffer in client.reserve(1, worker, 3, table(worker), 2):
                write(buffer, worker, 1)
        del buffer
        inner.close()
    wait_for_fds(before)


def test_messages_are_cut_where_they_end():
    lines = JsonLineDecoder()
    assert lines.feed(b'{"a": 1}\n{"b"') == [{"a": 1}]
    assert lines.feed(b": 2}") == []
    assert lines.feed(b"\n") == [{"b": 2}]
    with pytest.raises(DataError):
        lines.feed(b"x" * 70_000)


def test_errors_cross_the_socket():
    memory = decode_error(encode_error(VaultMemoryError(5, 3)))
    assert isinstance(memory, VaultMemoryError)
    assert memory.needed_bytes == 5
    data = decode_error(encode_error(DataError("seen", "allowed", "fix")))
    assert (type(data), data.fix) == (DataError, "fix")
    other = decode_error(encode_error(OSError("a disk")))
    assert str(other) == "OSError: a disk"
