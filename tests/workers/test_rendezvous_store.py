"""The rendezvous store: strangers, faults, and process groups that form by way of it."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from pickle import dumps, loads
from time import monotonic

import pytest
import torch
import torch.distributed as dist

from rayzero.engine.errors import ConfigError
from rayzero.engine.torch_private import PrefixStore
from rayzero.workers.group_sockets import SocketTracker
from rayzero.workers.messages import GenerationSpec
from rayzero.workers.process_group import is_collective_failure
from rayzero.workers.rendezvous_store import StoreClient, StoreServer

HOST = "127.0.0.1"
LIMIT_S = 60.0
SECRET = b"s" * 32


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer(HOST, LIMIT_S)
    server.admit(SECRET)
    yield server
    server.close()


def connect(server: StoreServer, secret: bytes = SECRET, limit_s: float = LIMIT_S) -> StoreClient:
    return StoreClient(HOST, server.port, secret, limit_s)


def join(
    store: StoreClient, rank: int, limit_s: float = LIMIT_S, prefix: str = "generation-1"
) -> dist.ProcessGroupGloo:
    keys = PrefixStore(prefix, store)
    return dist.ProcessGroupGloo(keys, rank, 2, timedelta(seconds=limit_s))


def all_reduce(server: StoreServer) -> list[float]:
    def reduce(rank: int) -> float:
        store = connect(server)
        group, value = join(store, rank), torch.ones(1) * (rank + 1)
        group.allreduce([value]).wait()
        return float(value)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(reduce, range(2)))


def test_store_listens_on_given_address_only(server: StoreServer):
    with socket.create_connection((HOST, server.port), 5):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port), 5)


def test_address_of_no_interface_is_an_error():
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1, Ray's address"):
        StoreServer("192.0.2.1", LIMIT_S)


def test_values_return(server: StoreServer):
    first, second = connect(server), connect(server)
    first.set("rank0", b"\0\xffaddress of rank 0")
    first.set("text", "also text")
    first.set("big", b"x" * 2**22)
    assert second.get("rank0") == b"\0\xffaddress of rank 0"
    assert second.get("text") == b"also text"
    assert second.get("big") == b"x" * 2**22
    assert second.check(["rank0", "text"])
    assert not second.check(["rank0", "rank1"])
    assert (first.add("count", 2), second.add("count", 3)) == (2, 5)
    clone = PrefixStore("te", second).clone()  # what C++ does for threads of its own
    clone.set("key", "value")
    assert PrefixStore("te", first).get("key") == b"value"
    assert second.delete_key("text")
    assert not second.delete_key("text")
    assert not first.check(["text"])


def test_keys_are_waited_for(server: StoreServer):
    first, second = connect(server), connect(server)
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(first.get, "late")
        waited = pool.submit(first.wait, ["late", "later"])
        second.set("late", "1")
        assert got.result(LIMIT_S) == b"1"
        assert not wait([waited], 0.05).done
        second.set("later", "2")
        waited.result(LIMIT_S)
    with pytest.raises(dist.DistStoreError, match=r"\['rank1'\] within 0.1 s"):
        first.wait(["late", "rank1"], timedelta(seconds=0.1))


def test_clients_wait_until_the_generation_is_known():
    server = StoreServer(HOST, LIMIT_S)
    with ThreadPoolExecutor(2) as pool:
        member, stranger = pool.submit(connect, server), pool.submit(connect, server, b"another's")
        assert not wait([member, stranger], 0.05).done
        server.admit(SECRET)
        member.result(LIMIT_S).set("key", "value")
        with pytest.raises(dist.DistNetworkError, match=f"store at {HOST}:{server.port}"):
            stranger.result(LIMIT_S)
    server.close()


def test_silent_client_is_left_after_the_limit():
    server = StoreServer(HOST, 0.1)
    server.admit(SECRET)
    with socket.create_connection((HOST, server.port), LIMIT_S) as silent:
        assert len(silent.recv(1000)) == 32
        assert silent.recv(1) == b""
    server.close()


def test_server_without_the_secret_is_an_error():
    """A stranger that has taken the port of a store that ended."""
    with socket.create_server((HOST, 0)) as listener, ThreadPoolExecutor(1) as pool:
        port = listener.getsockname()[1]
        connecting = pool.submit(StoreClient, HOST, port, SECRET, LIMIT_S)
        connection, _ = listener.accept()
        connection.sendall(b"n" * 32)
        connection.recv(64)
        connection.sendall(b"p" * 32)
        with pytest.raises(dist.DistNetworkError, match="does not know this generation's secret"):
            connecting.result(LIMIT_S)
        connection.close()


@pytest.mark.parametrize("ends", ["server", "connection"])
def test_wait_for_a_key_ends_with(server: StoreServer, ends: str):
    """The host of the store has died; another thread interrupts the wait."""
    sockets: list[socket.socket] = []
    client = StoreClient(HOST, server.port, SECRET, LIMIT_S, sockets.append)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.get, "of nobody")
        assert not wait([waiting], 0.05).done
        server.close() if ends == "server" else sockets[0].shutdown(socket.SHUT_RDWR)
        error = waiting.exception(LIMIT_S)
    assert error is not None
    assert is_collective_failure(error)
    with pytest.raises(dist.DistNetworkError):
        client.set("key", "value")


def test_closed_server_leaves_no_descriptors():
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            server = StoreServer(HOST, LIMIT_S)
            server.admit(SECRET)
            client = connect(server)
            client.set("key", "value")
            server.close()
            del client
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()


def test_store_of_a_dead_process_is_an_error_at_once():
    server = StoreServer(HOST, LIMIT_S)
    server.close()
    started_s = monotonic()
    with pytest.raises(dist.DistNetworkError, match=f"{HOST}:{server.port}.*refused"):
        connect(server)
    assert monotonic() - started_s < LIMIT_S / 2


def test_process_group_forms_under_junk(server: StoreServer):
    connections = [socket.create_connection((HOST, server.port), 5) for _ in range(200)]
    for number, connection in enumerate(connections):
        connection.sendall([b"", b"\0", b"\xff" * 1000, b"GET / HTTP/1.1\r\n\r\n"][number % 4])
    assert all_reduce(server) == [3.0, 3.0]
    for connection in connections:
        connection.close()


class LeavingMember(StoreClient):
    """Publishes its address, and fails at the first key of another member."""

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        raise dist.DistStoreError(f"{keys}")


def test_member_whose_peer_has_left_is_interrupted(server: StoreServer):
    """gloo waits for the connection that the peer announced, up to the group's timeout. Which of
    the two connects depends on their ports."""
    threads = ThreadPoolExecutor(1)
    for attempt in range(30):
        prefix = f"generation-{attempt}"
        leaving = LeavingMember(HOST, server.port, SECRET, LIMIT_S)
        with pytest.raises(dist.DistError):
            join(leaving, 1, prefix=prefix)
        sockets = SocketTracker()
        with sockets.recording(2):
            hooks = sockets.add_store, sockets.add_value
            staying = StoreClient(HOST, server.port, SECRET, LIMIT_S, *hooks)
            joining = threads.submit(join, staying, 0, prefix=prefix)
            if wait([joining], 0.5).done:
                continue
            started_s = monotonic()
            sockets.shutdown()
            error = joining.exception(LIMIT_S)
            assert monotonic() - started_s < LIMIT_S / 2
            assert error is None or is_collective_failure(error)  # at the latest the first use
            return
    pytest.fail("no attempt had to wait")


def test_secret_is_shared_by_assignments_and_in_no_text():
    spec = GenerationSpec(1, 2, "127.0.0.1", 4000)
    assert loads(dumps(spec)).secret == spec.secret != GenerationSpec(1, 2, "", 0).secret
    assert len(spec.secret) >= 32
    assert repr(spec.secret)[2:10] not in repr(spec)
