"""Interfaces by address, on whatever this machine has."""

from __future__ import annotations

import socket

from rayzero.workers.actor import interface_for


def test_the_interface_of_the_loopback_and_of_an_unused_address():
    name = interface_for("127.0.0.1")
    assert name in {interface for _, interface in socket.if_nameindex()}
    assert interface_for("203.0.113.7") is None
