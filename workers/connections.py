"""The TCP connections of one generation's process group, so that a wait in it can be broken off.

A gloo wait for a peer that is stopped, or behind a cut link, ends only at the group's timeout;
aborting the group does not end it. Shutting its sockets down does, on both sides, at once.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SOCKET = re.compile(r"socket:\[(\d+)\]")
_DESCRIPTORS = Path("/proc/self/fd")


class Connections:
    """Knows the sockets that were made inside `noting`, by inode.

    Another thread may have opened one of its own meanwhile. Of Ray's threads these are gRPC
    channels, which connect again by themselves.
    """

    def __init__(self) -> None:
        self._before: frozenset[str] | None = None
        self._after: frozenset[str] | None = None  # None while they are being made

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Around the making of a process group, its store included."""
        self._before = frozenset(_sockets())
        yield
        self._after = frozenset(_sockets())

    def cut(self) -> None:
        """Shuts down the connections made so far. From any thread; safe to repeat."""
        if self._before is None:
            return
        for inode, descriptor in _sockets().items():
            new = inode not in self._before
            if new and (self._after is None or inode in self._after):
                with suppress(OSError):
                    _shut(descriptor)


def _sockets() -> dict[str, int]:
    """This process's sockets: inode to descriptor. Empty where there is no /proc."""
    found = {}
    with suppress(OSError):
        for name in os.listdir(_DESCRIPTORS):
            with suppress(OSError):
                if match := _SOCKET.match(os.readlink(_DESCRIPTORS / name)):
                    found[match.group(1)] = int(name)
    return found


def _shut(descriptor: int) -> None:
    """Shuts a connected TCP socket; others, such as gloo's listener, are left alone: it would
    end the process if its accept failed."""
    with socket.socket(fileno=os.dup(descriptor)) as one:
        if one.family in (socket.AF_INET, socket.AF_INET6):
            one.getpeername()
            one.shutdown(socket.SHUT_RDWR)
