"""The sockets of a process group, and of the store where it forms.

That shutting them down ends a wait for a stopped peer is tested in test_recovery.py."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import ExitStack

import pytest

from rayzero.workers import group_sockets
from rayzero.workers.actor import interface_for
from rayzero.workers.group_sockets import SocketTracker


def test_reused_descriptor_is_not_shut_down(monkeypatch: pytest.MonkeyPatch):
    """A tracked socket is closed, and its number reused, between the listing and the shutdown."""
    listing = group_sockets._open_sockets
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tracker = SocketTracker()
        tracked = socket.create_connection(listener.getsockname())
        tracker.add_store(tracked)
        newer = []

        def list_then_reuse() -> dict[str, int]:
            sockets, number = listing(), tracked.detach()
            with socket.create_connection(listener.getsockname()) as connection:
                newer.append(socket.socket(fileno=os.dup2(connection.fileno(), number)))
            return sockets

        monkeypatch.setattr(group_sockets, "_open_sockets", list_then_reuse)
        tracker.shutdown()
        with newer[0]:
            newer[0].send(b"still connected")


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


def test_network_interface_of_address():
    name = interface_for("127.0.0.1")
    assert name in {interface for _, interface in socket.if_nameindex()}
    assert interface_for("203.0.113.7") is None
