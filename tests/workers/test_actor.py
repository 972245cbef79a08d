"""Network interfaces of this machine by address."""

from __future__ import annotations

import socket

from rayzero.workers.actor import interface_for


def test_network_interface_of_address():
    name = interface_for("127.0.0.1")
    assert name in {interface for _, interface in socket.if_nameindex()}
    assert interface_for("203.0.113.7") is None
