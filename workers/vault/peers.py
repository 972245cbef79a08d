"""Connections, pidfds, process inspection.

The connections that a vault holds, and the processes behind them.

What the system says about a process that does not answer.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from rayzero.workers.vault.protocol import JsonLineDecoder

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


_PIDFD_THREAD = os.O_EXCL  # PIDFD_THREAD, from Linux 6.9 on


_MAX_DISCONNECTED = 16
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
    decoder: JsonLineDecoder = field(default_factory=JsonLineDecoder)
    closed: bool = False


class Connections:
    """The open connections. The server's thread adds and removes, any thread may kill."""

    def __init__(self) -> None:
        self._peers: list[Peer] = []
        self._disconnected_pidfds: dict[
            int, int
        ] = {}  # by pid, the pidfds of the last that did, oldest first
        self._accepted_count = 0
        self._lock = Lock()  # a descriptor is not closed while another thread uses it

    def accept(self, connection: socket.socket) -> Peer | None:
        """The peer behind a new connection; None when that is another user's process."""
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        if uid != os.getuid():
            connection.close()
            return None
        connection.setblocking(False)
        with self._lock:
            self._accepted_count += 1
            peer = Peer(connection, self._accepted_count, _open_pidfd(pid))
            self._peers.append(peer)
            return peer

    def remove(self, peer: Peer) -> None:
        with self._lock:
            self._peers.remove(peer)
            peer.closed = True
            peer.socket.close()
            kept = self._retain_pidfd(peer)
            for fd in (-1 if kept else peer.pidfd, peer.thread_fd):
                if fd >= 0:
                    os.close(fd)

    def watch_thread(self, peer: Peer, thread: int) -> None:
        """Opens the `thread_fd` of a peer that has said hello, if it has such a thread."""
        raw = peer.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid = _CREDENTIALS.unpack(raw)[0]
        if peer.thread_fd < 0 and pid == peer.pid and Path(f"/proc/{pid}/task/{thread}").exists():
            peer.thread_fd = _open_pidfd(thread, _PIDFD_THREAD)

    def kill(self, pid: int) -> bool:
        """Ends a worker's process at once, if it is not over. False when no worker with that pid
        was connected."""
        with self._lock:
            known = {one.pid: one.pidfd for one in self._peers if one.worker >= 0}
            fd = known.get(pid, self._disconnected_pidfds.get(pid, -1))
            if fd < 0:
                return False
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            return True

    def _retain_pidfd(self, peer: Peer) -> bool:
        """Keeps the pidfd of one that hung up without a goodbye: it may still be told to die."""
        if peer.worker < 0 or peer.pidfd < 0:
            return False
        forgotten = [self._disconnected_pidfds.pop(peer.pid, -1)]
        self._disconnected_pidfds[peer.pid] = peer.pidfd
        if len(self._disconnected_pidfds) > _MAX_DISCONNECTED:
            forgotten.append(self._disconnected_pidfds.pop(next(iter(self._disconnected_pidfds))))
        for fd in forgotten:
            if fd >= 0:
                os.close(fd)
        return True

    def clear(self) -> None:
        """Those that hung up can be told nothing any more."""
        with self._lock:
            for fd in self._disconnected_pidfds.values():
                os.close(fd)
            self._disconnected_pidfds.clear()

    def list_peers(self) -> list[Peer]:
        with self._lock:
            return list(self._peers)


def _open_pidfd(of: int, flags: int = 0) -> int:
    """-1 when that is already gone, in a foreign namespace, or the kernel has no such pidfd."""
    try:
        return os.pidfd_open(of, flags)
    except OSError:
        return -1


_STACK_TIMEOUT_S = 5.0


_STATE_NAMES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device, cannot be interrupted",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead, not yet reaped",
    "X": "dead",
}


def inspect_process(pid: int, proc: Path = Path("/proc")) -> str:
    """The process's state, where it waits in the kernel, and its Python stacks if py-spy is there.

    One finding a line, stacks last; for people to read.
    """
    folder = proc / str(pid)
    try:
        status = (folder / "status").read_text()
    except OSError:
        return f"process {pid}: there is none"
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    letter = fields.get("State", "?").strip()[:1]
    lines = [f"process {pid}: {letter} ({_STATE_NAMES.get(letter, 'unknown')})"]
    channel = _kernel_wait_channel(folder)
    if channel:
        lines.append(f"waits in the kernel in {channel}")
    return "\n".join([*lines, _dump_stacks(pid)])


def _kernel_wait_channel(folder: Path) -> str:
    try:
        channel = (folder / "wchan").read_text().strip()
    except OSError:
        return ""
    return "" if channel == "0" else channel


def _dump_stacks(pid: int) -> str:
    beside = Path(sys.executable).with_name("py-spy")
    tool = str(beside) if beside.exists() else shutil.which("py-spy")
    if tool is None:
        return "no stacks: py-spy is not installed"
    try:
        # Without stopping the process: it may be stopped already, or about to be repaired.
        done = subprocess.run(
            [tool, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_STACK_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no stacks: {error}"
    return done.stdout.strip() if done.returncode == 0 else f"no stacks: {done.stderr.strip()}"
