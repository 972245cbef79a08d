"""The connections that a vault holds, and the processes behind them."""

from __future__ import annotations

import os
import signal
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from rayzero.workers.vault.wire import Lines

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_OF_A_THREAD = os.O_EXCL  # PIDFD_THREAD, from Linux 6.9 on


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
            for fd in (peer.pidfd, peer.thread_fd):
                if fd >= 0:
                    os.close(fd)

    def attend(self, peer: Peer, thread: int) -> None:
        """Opens the `thread_fd` of a peer that has said hello, if it has such a thread."""
        raw = peer.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid = _CREDENTIALS.unpack(raw)[0]
        if peer.thread_fd < 0 and pid == peer.pid and Path(f"/proc/{pid}/task/{thread}").exists():
            peer.thread_fd = _pidfd(thread, _OF_A_THREAD)

    def kill(self, pid: int) -> bool:
        """Ends a worker's process at once. False when no worker with that pid is connected."""
        with self._lock:
            for peer in self._peers:
                if peer.worker >= 0 and peer.pid == pid and peer.pidfd >= 0:
                    try:
                        signal.pidfd_send_signal(peer.pidfd, signal.SIGKILL)
                    except ProcessLookupError:
                        return False
                    return True
        return False

    def all(self) -> list[Peer]:
        with self._lock:
            return list(self._peers)


def _pidfd(of: int, flags: int = 0) -> int:
    """-1 when that is already gone, in a foreign namespace, or the kernel has no such pidfd."""
    try:
        return os.pidfd_open(of, flags)
    except OSError:
        return -1
