"""Lost workers, kills and malformed packets at a vault's socket, with real processes."""

from __future__ import annotations

import errno
import json
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from rayzero.engine.errors import DataError
from rayzero.workers.vault import peers, process_end
from rayzero.workers.vault.client import VaultClient
from rayzero.workers.vault.peers import Peer
from rayzero.workers.vault.records import ConnectionLost, Restore, SlotRef, VaultGoneError
from rayzero.workers.vault.requests import abstract_socket_name
from rayzero.workers.vault.server import VaultServer, make_address
from rayzero.workers.vault.vault import Vault
from tests.workers.vault.support import (
    VaultCluster,
    content,
    refs,
    steps_of,
    table,
    worker_process,
    write,
)

NOTICE_S = 0.1


@contextmanager
def stranger(vault: Vault) -> Iterator[socket.socket]:
    """A connection of somebody who is not a worker."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(abstract_socket_name(vault.address()))  # waits while there are many
        connection.settimeout(5.0)
        yield connection


def check_serves(vault: Vault, client: VaultClient) -> None:
    """That a worker's connection works, and no worker is lost."""
    assert vault.poll(0.05) == []
    assert client.reserve(1, 0, 1, table()).step == -1


@pytest.mark.alone
def test_killed_worker_is_reported_immediately_and_once(cluster: VaultCluster):
    """The minimum of three measurements; other load on the machine only adds to it."""
    vault, took_s = cluster.vault(), []
    for number in range(3):
        with worker_process("connect", vault.address(), worker=number) as worker:
            assert vault.poll(0.0) == []
            started = time.monotonic()
            worker.kill()
            assert vault.poll(60.0) == [ConnectionLost(number, worker.pid)]
            took_s.append(time.monotonic() - started)
            worker.wait(10)
            assert vault.poll(0.05) == []
    assert min(took_s) < NOTICE_S


@pytest.mark.parametrize(
    ("how", "status", "stack"),
    [
        ("3", "its process exited with code 3", None),
        ("kill", "its process was killed by SIGKILL, by a person, ", None),
        ("segfault", "its process was killed by SIGSEGV", "in read_address_zero"),
    ],
)
def test_loss_says_how_the_process_ended(
    cluster: VaultCluster,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    status: str,
    stack: str | None,
):
    monkeypatch.setattr(process_end, "_EXIT_WAIT_MS", 10_000)  # sockets close before the exit
    vault = cluster.vault()
    with worker_process("end_on_request", vault.address()) as worker:
        worker.kill() if how == "kill" else print(how, file=worker.stdin, flush=True)
        [loss] = vault.poll(60.0)
    assert isinstance(loss, ConnectionLost)
    if _kernel_tells_exit_status():
        assert loss.end.status.startswith(status)
    if stack is None:
        assert loss.end.stack == ""
    else:
        assert loss.end.stack.startswith("Fatal Python error: Segmentation fault")
        assert stack in loss.end.stack
        assert "Extension modules" not in loss.end.stack


def _kernel_tells_exit_status() -> bool:
    return tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 15)


def test_death_is_detected_before_socket_closes(cluster: VaultCluster):
    """The threads of a dying process exit first, its sockets close last."""
    if not _kernel_watches_threads():
        pytest.skip("this kernel has no pidfds of threads (Linux 6.9)")
    vault, client = cluster.vault(), cluster.client(worker=5)
    client._closed.set()  # what the process's death does to that thread
    assert vault.poll(10.0) == [ConnectionLost(5, os.getpid())]
    assert vault.poll(0.0) == []


def test_thread_exit_after_deregister_is_no_lost_worker(cluster: VaultCluster):
    vault = cluster.vault()
    for _ in range(20):  # the request and the exit arrive in any order
        cluster.client().close()
    cluster.client(worker=7)  # its reply follows all earlier events
    assert vault.poll(0.2) == []


def _kernel_watches_threads() -> bool:
    go = threading.Event()
    thread = threading.Thread(target=go.wait)
    thread.start()
    try:
        os.close(os.pidfd_open(thread.native_id or 0, os.O_EXCL))
        return True
    except OSError:
        return False
    finally:
        go.set()
        thread.join()


def test_death_is_detected_while_child_keeps_socket_open(cluster: VaultCluster):
    vault = cluster.vault()
    with worker_process("fork", vault.address(), worker=2) as worker:
        worker.kill()
        worker.wait(10)
        assert vault.poll(60.0) == [ConnectionLost(2, worker.pid)]


def test_closing_vault_ends_waiting_poll(cluster: VaultCluster):
    vault = cluster.vault()
    answers: list[list[ConnectionLost]] = []
    thread = threading.Thread(target=lambda: answers.append(vault.poll(60.0)))
    thread.start()
    vault.close()
    thread.join(30)
    assert answers == [[]]


def test_killed_writer_leaves_its_complete_versions(cluster: VaultCluster):
    vault = cluster.vault()
    with worker_process("mirror", vault.address()) as worker:
        assert steps_of(vault) == [(0, 2)]
        worker.kill()
        vault.poll(10.0)
        assert steps_of(vault) == [(0, 2)]
        restore = Restore(2, tuple(refs((1, 0, 2))))
        for source in [cluster.client(worker=index).open_source(restore) for index in (1, 2)]:
            data = bytearray(64)
            source.read(0, 0, memoryview(data))
            assert (data, source.metadata(0)) == (content(0, 2), {"step": 2, "rank": 0})
            source.close()
        # The unfinished buffer is reused by the next reservation.
        new = cluster.client(worker=1).reserve(2, 0, 1, table())
        assert vault.usage()["spare"] == 0
        write(new, 0, 3)
        assert steps_of(vault) == [(0, 2), (0, 3)]


def test_only_connected_workers_are_killed(cluster: VaultCluster):
    vault = cluster.vault()
    with worker_process("connect", vault.address()) as worker:
        assert not vault.kill(os.getppid())
        assert not vault.kill(os.getpid())
        assert vault.kill(worker.pid)
        assert worker.wait(10) == -9
        vault.poll(10.0)
        assert vault.kill(worker.pid)  # it has already exited


def test_without_pidfds_deaths_are_detected_and_kill_returns_false(
    cluster: VaultCluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(peers, "_open_pidfd", lambda *_: -1)
    vault = cluster.vault()
    with worker_process("connect", vault.address()) as worker:
        assert not vault.kill(worker.pid)
        worker.kill()
        assert vault.poll(10.0) == [ConnectionLost(0, worker.pid)]


def test_processes_of_other_users_are_rejected(
    cluster: VaultCluster, monkeypatch: pytest.MonkeyPatch
):
    address = cluster.vault().address()
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    with pytest.raises(VaultGoneError):
        cluster.client()
    monkeypatch.undo()
    assert address


@pytest.mark.parametrize(
    "line",
    [
        b"no json",
        b"[1]",
        b"\xff",
        b"x" * 100_000,
        b"[" * 60_000,
        b'{"call": "register"}',
        b'{"call": 5}',
        b'{"call": "deregister", "arguments": [], "id": ' + b"[" * 400 + b"]" * 400 + b"}",
        b"",
    ],
)
def test_malformed_packets_affect_no_other_connection(cluster: VaultCluster, line: bytes):
    vault, client = cluster.vault(), cluster.client()
    with stranger(vault) as connection, suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(line)
    check_serves(vault, client)


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        (b'{"id": 1, "call": "dance"}', "vault request 'dance'"),
        (b'{"id": 2, "call": "_fetch", "arguments": []}', "vault request '_fetch'"),
        (b'{"id": 3, "call": "open_version"}', "open_version with None"),
        (b'{"id": 4, "call": "open_version", "arguments": [1]}', r"open_version with \[1\]"),
        (b'{"id": 5, "call": "register", "arguments": [null, 1, 1, 1]}', r"with \[None, 1, 1, 1\]"),
    ],
)
def test_invalid_requests_get_an_error_reply(cluster: VaultCluster, line: bytes, answer: str):
    with stranger(cluster.vault()) as connection:
        connection.send(line)
        request_id, error = pickle.loads(connection.recv(4096))
        assert request_id == json.loads(line)["id"]
        with pytest.raises(DataError, match=answer):
            raise error


def test_error_in_one_connection_ends_no_other(
    cluster: VaultCluster, monkeypatch: pytest.MonkeyPatch
):
    vault, client = cluster.vault(), cluster.client()

    def fail(server: VaultServer, peer: Peer, message: dict[str, Any]) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(VaultServer, "_handle", fail)
        with pytest.raises(VaultGoneError):
            cluster.client(worker=7)
    check_serves(vault, client)


def test_connection_with_too_many_slow_requests_is_closed(cluster: VaultCluster):
    vault, client, may_continue = cluster.vault(), cluster.client(), threading.Event()
    cluster.vault("b")
    cluster.on_fetch = lambda ref, offset: may_continue.wait(10.0) and None
    request = {"id": 1, "call": "fetch_version", "arguments": [1, 0, 4, "b", 0, 1]}
    with stranger(vault) as connection:
        for _ in range(peers.MAX_SLOW_REQUESTS + 1):
            connection.send(json.dumps(request).encode())
        assert connection.recv(4096) == b""
    may_continue.set()
    check_serves(vault, client)


def test_idle_strangers_do_not_use_up_descriptors(cluster: VaultCluster):
    vault = cluster.vault()
    with ExitStack() as strangers:
        for _ in range(300):
            strangers.enter_context(stranger(vault))
        client = cluster.client()
        assert len(vault._server._peers) < 100
        check_serves(vault, client)


def test_client_waits_while_the_backlog_is_full(cluster: VaultCluster):
    vault, may_continue, strangers = cluster.vault(), threading.Event(), []
    vault._server._on_readable(stop := os.eventfd(1), lambda: may_continue.wait(10.0))
    time.sleep(0.05)
    failure = 0
    while failure == 0:  # until the backlog is full
        strangers.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        strangers[-1].settimeout(0.0)
        failure = strangers[-1].connect_ex(abstract_socket_name(vault.address()))
    assert failure == errno.EAGAIN
    threading.Timer(0.3, lambda: (os.eventfd_read(stop), may_continue.set())).start()
    assert cluster.client().reserve(1, 0, 1, table()).step == -1
    for stranger in strangers:
        stranger.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_poll_fails_once_the_thread_has_ended(cluster: VaultCluster):
    vault = cluster.vault()
    assert vault.poll(0.0) == []
    vault._server._on_readable(stop := os.eventfd(1), _end_thread)
    vault._server._thread.join(30)
    vault._server._answered.clear()  # it may have answered a last ping
    with pytest.raises(VaultGoneError, match="thread that serves"):
        vault.poll(0.0)
    os.close(stop)


def test_poll_returns_only_while_the_thread_serves(cluster: VaultCluster):
    vault, may_continue, replies = cluster.vault(), threading.Event(), []
    vault._server._on_readable(stop := os.eventfd(1), lambda: may_continue.wait(10.0))
    time.sleep(0.05)
    poll = threading.Thread(target=lambda: replies.append(vault.poll(0.0)))
    poll.start()
    poll.join(0.3)
    assert not replies
    os.eventfd_read(stop)
    may_continue.set()
    poll.join(30)
    assert replies == [[]]


def _end_thread() -> None:
    sys.exit()


def test_slow_fetch_does_not_delay_other_requests(cluster: VaultCluster):
    vault, other = cluster.vault(), cluster.vault("b")
    buffer = cluster.client("b").reserve(1, 0, 1, table())
    write(buffer, 0, 4)
    fetching, may_continue = threading.Event(), threading.Event()

    def wait(ref: SlotRef, offset: int) -> None:
        fetching.set()
        may_continue.wait(10.0)

    cluster.on_fetch = wait
    client = cluster.client(worker=1)
    opened: list[object] = []
    restore = Restore(4, tuple(refs((1, 0, 4), node="b")))
    thread = threading.Thread(target=lambda: opened.append(client.open_source(restore)))
    thread.start()
    assert fetching.wait(5.0)
    with worker_process("connect", vault.address(), worker=7) as worker:
        worker.kill()
        assert vault.poll(10.0) == [ConnectionLost(7, worker.pid)]
    assert cluster.client(worker=2).reserve(1, 1, 2, table()).step == -1
    assert not opened
    may_continue.set()
    thread.join(30)
    assert len(opened) == 1
    assert other.poll(0.0) == []


def test_address_is_short_ascii_and_unique():
    first, second = make_address("a/job näme\0" * 50), make_address("x")
    assert first != make_address("a/job näme\0" * 50)
    assert first.startswith("@rayzero-ajobnme")
    assert len(first) < 100
    assert second.isascii()
