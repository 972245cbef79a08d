"""Interfaces by address, on whatever this machine has."""

from __future__ import annotations

import socket

from rayzero.workers.interfaces import interface_of


def test_the_loopback_and_an_address_nobody_has():
    name = interface_of("127.0.0.1")
    assert name in {one for _, one in socket.if_nameindex()}
    assert interface_of("203.0.113.7") is None
