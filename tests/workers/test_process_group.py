"""Shutting down a process group ends a wait for a stopped peer in another thread."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path

import pytest

from rayzero.workers import group_sockets
from rayzero.workers.group_sockets import SocketTracker

RANK = textwrap.dedent(
    """
    import sys, threading, time
    import torch, torch.distributed as dist
    from datetime import timedelta
    from rayzero.workers.group_sockets import SocketTracker
    from rayzero.workers.rendezvous_store import StoreClient, StoreServer

    rank = int(sys.argv[1])
    if rank == 0:
        server = StoreServer("127.0.0.1", 60.0)
        server.admit(b"secret")
        port = server.port
        print(port, flush=True)
    else:
        port = int(sys.stdin.readline())
    sockets = SocketTracker()
    store = StoreClient("127.0.0.1", port, b"secret", 60.0, sockets.add_store, sockets.add_value)
    with sockets.recording(2):
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
        )
    dist.barrier()
    print("ready", flush=True)
    sys.stdin.readline()
    if rank == 1:
        time.sleep(60)
    starts = []
    def shut_down():
        while not starts:
            time.sleep(0.01)
        time.sleep(0.3)  # until the wait below is in progress
        starts.append(time.perf_counter())
        sockets.shutdown()
        sockets.shutdown()
    thread = threading.Thread(target=shut_down)
    thread.start()
    starts.append(0.0)
    try:
        dist.irecv(torch.ones(4), 1).wait()
    except RuntimeError as error:
        assert "closed by peer" in str(error), error
        print(f"ended {time.perf_counter() - starts[-1]}", flush=True)
    thread.join()
    """
)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_shutdown_ends_wait_for_stopped_peer():
    ranks = [start(rank) for rank in (0, 1)]
    try:
        ranks[1].stdin.write(ranks[0].stdout.readline())
        ranks[1].stdin.flush()
        for process in ranks:
            assert process.stdout.readline() == "ready\n"
        os.kill(ranks[1].pid, signal.SIGSTOP)
        ranks[0].stdin.write("go\n")
        ranks[0].stdin.flush()
        state, seconds = ranks[0].stdout.readline().split()
        assert state == "ended"
        assert float(seconds) < 30, "less than the timeout of the collective"
        assert ranks[0].wait(100) == 0
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_reused_descriptor_is_not_shut_down(monkeypatch: pytest.MonkeyPatch):
    """A tracked socket is closed, and its number reused, between the listing and the shutdown."""
    listing = group_sockets._open_sockets
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tracker = SocketTracker()
        tracked = socket.create_connection(listener.getsockname())
        tracker.add_store(tracked)
        newer = []

        def list_then_reuse() -> dict[str, int]:
            sockets, number = listing(), tracked.fileno()
            tracked.close()
            newer.append(socket.create_connection(listener.getsockname()))
            assert newer[0].fileno() == number
            return sockets

        monkeypatch.setattr(group_sockets, "_open_sockets", list_then_reuse)
        tracker.shutdown()
        with newer[0]:
            newer[0].send(b"still connected")


def start(rank: int) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", RANK, str(rank)]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_only_sockets_with_the_groups_addresses_are_shut(family: socket.AddressFamily):
    """The user's, opened while the group forms, stay open, also those to the same host."""
    host = "::1" if family == socket.AF_INET6 else "127.0.0.1"
    tracker = SocketTracker()
    with ExitStack() as sockets, tracker.recording(1):
        listeners = [
            sockets.enter_context(socket.create_server((host, 0), family=family)) for _ in range(3)
        ]
        ends = []
        for listener in listeners:
            ends.append(sockets.enter_context(socket.create_connection(listener.getsockname()[:2])))
            ends.append(sockets.enter_context(listener.accept()[0]))
        store, at_store, group, at_group, user, at_user = ends
        tracker.add_store(store)
        flow = bytes(4) if family == socket.AF_INET6 else b""
        port, address = listeners[1].getsockname()[1], socket.inet_pton(family, host)
        sockaddr = family.to_bytes(2, sys.byteorder) + port.to_bytes(2, "big") + flow + address
        tracker.add_value(b"\n\x02\x02 key \x0a" + sockaddr + b"\n\x00\x02\x00")
        tracker.shutdown()
        user.sendall(b"sent")
        assert at_user.recv(4) == b"sent"
        assert [end.recv(1) for end in (store, group, at_group)] == [b"", b"", b""]
        assert at_store.recv(1) == b"", "the store's end sees that its client has left"
        listeners[1].settimeout(5.0)
        with listeners[1].accept()[0] as opened:
            assert opened.recv(8) == bytes(8), "a connection that gloo may wait for"
        for listener in (listeners[0], listeners[2]):
            listener.settimeout(0.0)
            with pytest.raises(BlockingIOError):
                listener.accept()
