"""Strangers at the rendezvous store, and process groups that form by way of it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from pickle import dumps, loads
from time import monotonic, sleep

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from rayzero.engine.errors import ConfigError
from rayzero.workers import rendezvous_store
from rayzero.workers.group_sockets import SocketTracker
from rayzero.workers.messages import GenerationSpec
from rayzero.workers.process_group import is_collective_failure
from rayzero.workers.rendezvous_store import AuthenticatedStore, ForgedKeyError, open_store

LIMIT = timedelta(seconds=60)
SECRET = b"s" * 32


@pytest.fixture
def server() -> TCPStore:
    return open_store("127.0.0.1", 60.0)


def connect(server: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)


def member(server: TCPStore, secret: bytes = SECRET) -> AuthenticatedStore:
    return AuthenticatedStore(connect(server), secret)


def join(store: AuthenticatedStore, rank: int, limit: timedelta = LIMIT) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(PrefixStore("generation-1", store), rank, 2, limit)


def forge(server: TCPStore, change: Callable[[TCPStore, str], object]) -> None:
    """Waits for keys, and then does to each what a stranger can."""
    stranger, deadline_s = connect(server), monotonic() + 30
    while not (names := stranger.list_keys()) and monotonic() < deadline_s:
        sleep(0.01)
    for name in names:
        change(stranger, name)
    stranger.check(names)  # `set` does not wait for the server


def all_reduce(server: TCPStore) -> list[float]:
    def reduce(rank: int) -> float:
        store = member(server)
        group, value = join(store, rank), torch.ones(1) * (rank + 1)
        group.allreduce([value]).wait()
        return float(value)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(reduce, range(2)))


def test_store_listens_on_given_address_only(server: TCPStore):
    with socket.create_connection(("127.0.0.1", server.port), 5):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port), 5)


def test_address_of_no_interface_is_an_error():
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1, Ray's address"):
        open_store("192.0.2.1", 60.0)


def test_values_return(server: TCPStore):
    first, second = member(server), member(server)
    first.set("rank0", b"\0\xffaddress of rank 0")
    first.set("text", "also text")
    assert second.get("rank0") == b"\0\xffaddress of rank 0"
    assert second.get("text") == b"also text"
    assert second.check(["rank0", "text"])
    assert not second.check(["rank1"])
    with pytest.raises(ForgedKeyError, match="rank0"):
        member(server, b"of another generation").get("rank0")
    assert (first.add("count", 2), second.add("count", 3)) == (2, 5)
    clone = PrefixStore("te", second).clone()  # what C++ does for threads of its own
    clone.set("key", "value")
    assert PrefixStore("te", first).get("key") == b"value"
    assert second.delete_key("text")
    assert not first.check(["text"])


@pytest.mark.parametrize("forged", [b"", b"x", b"y" * 2**20])
def test_changed_value_is_an_error_that_names_it(server: TCPStore, forged: bytes):
    member(server).set("rank0", "address")
    forge(server, lambda stranger, name: stranger.set(name, forged))
    with pytest.raises(ForgedKeyError, match="'rank0' was changed"):
        member(server).get("rank0")


def test_key_deleted_after_the_wait_for_it_is_an_error_at_once(server: TCPStore):
    """torch's `get` would wait for it until the timeout."""
    store = member(server)
    store.set("a", "1")
    store.wait(["a"])
    forge(server, TCPStore.delete_key)
    started_s = monotonic()
    with pytest.raises(ForgedKeyError, match="'a' was changed or deleted"):
        store.get("a")
    assert monotonic() - started_s < LIMIT.total_seconds()


def test_value_of_another_key_is_an_error(server: TCPStore):
    store, stranger = member(server), connect(server)
    store.set("rank0", "first")
    assert store.check(["rank0"])  # `set` does not wait for the server
    [name] = stranger.list_keys()
    store.set("rank1", "second")
    assert store.check(["rank1"])
    [other] = {*stranger.list_keys()} - {name}
    stranger.set(name, stranger.get(other))
    assert stranger.check([name])
    with pytest.raises(ForgedKeyError, match="rank0"):
        store.get("rank0")


def test_missing_key_is_named_at_the_timeout(server: TCPStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rendezvous_store, "UNCHECKED_WAIT_S", 0.05)
    store = member(server)
    with pytest.raises(dist.DistStoreError, match=r"\['rank1'\] within 0.1 s"):
        store.wait(["rank1"], timedelta(seconds=0.1))
    with pytest.raises(dist.DistStoreError):
        store.wait(["rank1"], timedelta(seconds=0.01))


def test_process_group_forms_under_junk(server: TCPStore):
    connections = [socket.create_connection(("127.0.0.1", server.port), 5) for _ in range(200)]
    for number, connection in enumerate(connections):
        connection.sendall([b"", b"\0", b"\xff" * 1000, b"GET / HTTP/1.1\r\n\r\n"][number % 4])
    connect(server).set("big", b"x" * 2**22)
    assert all_reduce(server) == [3.0, 3.0]
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("change", ["changed", "deleted"])
def test_forged_keys_fail_the_generation(
    server: TCPStore, monkeypatch: pytest.MonkeyPatch, change: str
):
    monkeypatch.setattr(rendezvous_store, "UNCHECKED_WAIT_S", 0.2)
    stores = [member(server), member(server)]
    with ThreadPoolExecutor(1) as pool:
        # The one that meets no forged key waits for its peer, in gloo, several times this long.
        limit = timedelta(seconds=1) if change == "changed" else LIMIT
        first = pool.submit(join, stores[0], 0, limit)
        if change == "deleted":
            forge(server, lambda stranger, name: stranger.delete_key(name))
            error = first.exception(30)
        else:
            forge(server, lambda stranger, name: stranger.set(name, b"forged"))
            with pytest.raises(RuntimeError) as caught:
                join(stores[1], 1)
            error = caught.value
    assert error is not None
    assert change in str(error)
    assert is_collective_failure(error)


class LeavingMember(AuthenticatedStore):
    """Publishes its address, and fails at the first key of another member."""

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        raise ForgedKeyError(f"{keys} changed by a stranger")


def test_member_whose_peer_has_left_is_interrupted(server: TCPStore):
    """gloo waits for the connection that the peer announced, up to the group's timeout. Which of
    the two connects depends on their ports."""
    threads = ThreadPoolExecutor(1)
    for attempt in range(30):
        secret = SECRET + bytes([attempt])  # other keys
        with pytest.raises(dist.DistError):
            join(LeavingMember(connect(server), secret), 1)
        sockets = SocketTracker()
        with sockets.recording(2):
            staying = AuthenticatedStore(connect(server), secret, sockets.add_value)
            joining = threads.submit(join, staying, 0)
            if wait([joining], 0.5).done:
                continue
            started_s = monotonic()
            sockets.shutdown()
            error = joining.exception(LIMIT.total_seconds())
            assert monotonic() - started_s < LIMIT.total_seconds() / 2
            assert error is None or is_collective_failure(error)  # at the latest the first use
            return
    pytest.fail("no attempt had to wait")


def test_secret_is_shared_by_assignments_and_in_no_text():
    spec = GenerationSpec(1, 2, "127.0.0.1", 4000)
    assert loads(dumps(spec)).secret == spec.secret != GenerationSpec(1, 2, "", 0).secret
    assert len(spec.secret) >= 32
    assert repr(spec.secret)[2:10] not in repr(spec)
