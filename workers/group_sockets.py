"""The sockets of a process group, found by their addresses. Shutting them down ends its waits.

A gloo wait for a peer that is stopped or unreachable ends only at the group's timeout, and aborting
the group does not end it. Shutting down the group's sockets does, at once and on both sides. While
a group forms, a rank may wait for a connection that its peer never opens; this process opens it.

Threads of the training function may open sockets while the group forms, which must stay open. A
process's sockets do not tell which thread opened them, but a group's ranks tell each other where
they listen by way of the store: gloo for each rank, NCCL for the root of its bootstrap, both as the
system's `sockaddr`. A socket is the group's if one of its ends has such an address, or its other
end is the store's. NCCL's connections among other ranks are not found: such a connection ends with
the process at its other end, and a wait on it at the time limit of a start.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_SOCKET_LINK = re.compile(r"socket:\[(\d+)\]")
_FD_FOLDER = Path("/proc/self/fd")
_SELF_CONNECT_S = 1.0  # limit to connect to this process's own listener: the kernel answers
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_V4_IN_V6 = bytes(10) + b"\xff\xff"  # prefix of an IPv4 peer's address at an IPv6 socket
_IPV4, _IPV6 = (re.escape(family.to_bytes(2, sys.byteorder)) for family in _FAMILIES)
# Family, port, [flow,] address; overlapping. A coincidental match is the address of no socket.
_SOCKADDR = re.compile(rb"(?=%b(..)(.{4})|%b(..).{4}(.{16}))" % (_IPV4, _IPV6), re.DOTALL)


class SocketTracker:
    """Knows one group's addresses. The joining thread adds to them; any thread may shut down."""

    def __init__(self) -> None:
        self.is_recording = False
        """Whether a group is being created. Stays True if that fails."""
        self._listeners: set[bytes] = set()  # port and IP, as `_pack`ed
        self._stores: set[bytes] = set()
        self._world_size = 0

    @contextmanager
    def recording(self, world_size: int) -> Iterator[None]:
        """Encloses the creation of a process group of `world_size` ranks and its store."""
        self._world_size = world_size
        self.is_recording = True
        yield
        self.is_recording = False

    def add_store(self, connection: socket.socket) -> None:
        """Adds the peer of a connection to the store that the group is about to use."""
        self._stores.add(_pack(connection.getpeername()))

    def add_value(self, value: bytes) -> None:
        """Adds the addresses in a value that went through the group's store."""
        for port4, ipv4, port6, ipv6 in _SOCKADDR.findall(value):
            self._listeners.add(port4 + ipv4 or port6 + ipv6.removeprefix(_V4_IN_V6))

    def shutdown(self) -> None:
        """Ends the waits for peers: shuts down the connections created so far, and opens those that
        a group still waits for while it forms. Any thread may call this; idempotent."""
        if not (self._stores or self._listeners):
            return
        for inode, descriptor in _open_sockets().items():
            with suppress(OSError):
                self._shutdown_tcp(descriptor, inode)

    def _shutdown_tcp(self, descriptor: int, inode: str) -> None:
        """Shuts down a connected TCP socket of the group. gloo's listener stays open, because gloo
        aborts the process if accept fails. Instead the listener gets the connections it waits for;
        a peer sends the number of its pair first. May raise OSError."""
        duplicate = os.dup(descriptor)
        if os.readlink(_FD_FOLDER / str(duplicate)) != f"socket:[{inode}]":
            os.close(duplicate)  # the socket was closed meanwhile, and its number reused
            return
        with socket.socket(fileno=duplicate) as found:
            if found.family not in _FAMILIES or found.type != socket.SOCK_STREAM:
                return
            is_own_end = _pack(found.getsockname()) in self._listeners
            if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                if is_own_end or self._has_peer(found):
                    found.shutdown(socket.SHUT_RDWR)
                return
            if not (is_own_end and self.is_recording):
                return
            for number in range(self._world_size):
                with socket.create_connection(found.getsockname()[:2], _SELF_CONNECT_S) as peer:
                    peer.sendall(number.to_bytes(8, sys.byteorder))

    def _has_peer(self, connection: socket.socket) -> bool:
        """Returns whether a connection goes to a rank of the group, or to its store."""
        address = _pack(connection.getpeername())
        return address in self._listeners or address in self._stores


def _pack(address: tuple[Any, ...]) -> bytes:
    """Returns port and IP of a socket's end, in network order."""
    host, port = str(address[0]).partition("%")[0], int(address[1])
    ip = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    return port.to_bytes(2, "big") + ip.removeprefix(_V4_IN_V6)


def _open_sockets() -> dict[str, int]:
    """Returns this process's sockets, from inode to descriptor. Empty without /proc."""
    sockets = {}
    with suppress(OSError):
        for name in os.listdir(_FD_FOLDER):
            with suppress(OSError):
                if match := _SOCKET_LINK.match(os.readlink(_FD_FOLDER / name)):
                    sockets[match.group(1)] = int(name)
    return sockets
