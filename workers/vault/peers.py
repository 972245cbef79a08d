"""The connections that a vault holds, and the processes behind them."""

from __future__ import annotations

import os
import signal
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from rayzero.workers.vault.wire import Lines

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_OF_A_THREAD = os.O_EXCL  # PIDFD_THREAD, from Linux 6.9 on
_REMEMBERED = 16
"""Workers that hung up; it takes long until a dead one's number is used again."""


@dataclass(eq=False)
class Peer:
    """One connection.

    Attributes:
        number: its own, never used again.
        pidfd: refers to the process, also when its number is used again; -1 when there is none.
        thread_fd: refers to a thread that lives until the process dies or has said goodbye; -1
            when there is none.
        worker: who it is, once it said hello; -1 before, and after it said goodbye.
        pid: as the process itself knows it.
    """

    socket: socket.socket
    number: int
    pidfd: int = -1
    thread_fd: int = -1
    worker: int = -1
    pid: int = 0
    lines: Lines = field(default_factory=Lines)
    closed: bool = False


class Peers:
    """The open connections. The server's thread adds and removes, any thread may kill."""

    def __init__(self) -> None:
        self._peers: list[Peer] = []
        self._hung_up: dict[int, int] = {}  # by pid, the pidfds of the last that did, oldest first
        self._count = 0
        self._lock = Lock()  # a descriptor is not closed while another thread uses it

    def admit(self, connection: socket.socket) -> Peer | None:
        """The peer behind a new connection; None when that is another user's process."""
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        if uid != os.getuid():
            connection.close()
            return None
        connection.setblocking(False)
        with self._lock:
            self._count += 1
            peer = Peer(connection, self._count, _pidfd(pid))
            self._peers.append(peer)
            return peer

    def remove(self, peer: Peer) -> None:
        with self._lock:
            self._peers.remove(peer)
            peer.closed = True
            peer.socket.close()
            kept = self._remember(peer)
            for fd in (-1 if kept else peer.pidfd, peer.thread_fd):
                if fd >= 0:
                    os.close(fd)

    def attend(self, peer: Peer, thread: int) -> None:
        """Opens the `thread_fd` of a peer that has said hello, if it has such a thread."""
        raw = peer.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid = _CREDENTIALS.unpack(raw)[0]
        if peer.thread_fd < 0 and pid == peer.pid and Path(f"/proc/{pid}/task/{thread}").exists():
            peer.thread_fd = _pidfd(thread, _OF_A_THREAD)

    def kill(self, pid: int) -> bool:
        """Ends a worker's process at once, if it is not over. False when no worker with that pid
        was connected."""
        with self._lock:
            known = {one.pid: one.pidfd for one in self._peers if one.worker >= 0}
            fd = known.get(pid, self._hung_up.get(pid, -1))
            if fd < 0:
                return False
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            return True

    def _remember(self, peer: Peer) -> bool:
        """Keeps the pidfd of one that hung up without a goodbye: it may still be told to die."""
        if peer.worker < 0 or peer.pidfd < 0:
            return False
        forgotten = [self._hung_up.pop(peer.pid, -1)]
        self._hung_up[peer.pid] = peer.pidfd
        if len(self._hung_up) > _REMEMBERED:
            forgotten.append(self._hung_up.pop(next(iter(self._hung_up))))
        for fd in forgotten:
            if fd >= 0:
                os.close(fd)
        return True

    def forget(self) -> None:
        """Those that hung up can be told nothing any more."""
        with self._lock:
            for fd in self._hung_up.values():
                os.close(fd)
            self._hung_up.clear()

    def all(self) -> list[Peer]:
        with self._lock:
            return list(self._peers)


def _pidfd(of: int, flags: int = 0) -> int:
    """-1 when that is already gone, in a foreign namespace, or the kernel has no such pidfd."""
    try:
        return os.pidfd_open(of, flags)
    except OSError:
        return -1
