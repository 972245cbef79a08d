"""A vault's connections, and the processes behind them."""

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
_PIDFD_THREAD = os.O_EXCL  # PIDFD_THREAD, Linux 6.9

_MAX_DISCONNECTED = 16
"""How many pidfds of disconnected workers are retained."""


@dataclass(eq=False)
class Peer:
    """One connection.

    Attributes:
        number: unique, never reused.
        pidfd: refers to the process, even if its pid is reused; -1: unavailable.
        thread_fd: refers to a thread that exits when the process dies or deregisters; -1:
            unavailable.
        worker: the worker's index while it is registered; otherwise -1.
        pid: in the process's own pid namespace.
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
    """The open connections. The server's thread adds and removes; any thread may kill."""

    def __init__(self) -> None:
        self._peers: list[Peer] = []
        self._disconnected_pidfds: dict[int, int] = {}  # by pid, oldest first
        self._accepted_count = 0
        self._lock = Lock()  # no descriptor is closed while another thread uses it

    def accept(self, connection: socket.socket) -> Peer | None:
        """The peer of a new connection; None (and closed) if it is another user's process."""
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
        """Opens the `thread_fd` of a registered peer, if it has that thread."""
        raw = peer.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid = _CREDENTIALS.unpack(raw)[0]
        if peer.thread_fd < 0 and pid == peer.pid and Path(f"/proc/{pid}/task/{thread}").exists():
            peer.thread_fd = _open_pidfd(thread, _PIDFD_THREAD)

    def kill(self, pid: int) -> bool:
        """Sends SIGKILL to a worker's process. False if no worker with that pid was connected."""
        with self._lock:
            pidfds = {peer.pid: peer.pidfd for peer in self._peers if peer.worker >= 0}
            fd = pidfds.get(pid, self._disconnected_pidfds.get(pid, -1))
            if fd < 0:
                return False
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            return True

    def _retain_pidfd(self, peer: Peer) -> bool:
        """Keeps the pidfd of a worker that did not deregister, so that it can still be killed."""
        if peer.worker < 0 or peer.pidfd < 0:
            return False
        discarded = [self._disconnected_pidfds.pop(peer.pid, -1)]
        self._disconnected_pidfds[peer.pid] = peer.pidfd
        if len(self._disconnected_pidfds) > _MAX_DISCONNECTED:
            discarded.append(self._disconnected_pidfds.pop(next(iter(self._disconnected_pidfds))))
        for fd in discarded:
            if fd >= 0:
                os.close(fd)
        return True

    def clear(self) -> None:
        """Closes the retained pidfds of disconnected workers."""
        with self._lock:
            for fd in self._disconnected_pidfds.values():
                os.close(fd)
            self._disconnected_pidfds.clear()

    def list_peers(self) -> list[Peer]:
        with self._lock:
            return list(self._peers)


def _open_pidfd(task: int, flags: int = 0) -> int:
    """-1 if the task has exited, is in another pid namespace, or the kernel lacks such pidfds."""
    try:
        return os.pidfd_open(task, flags)
    except OSError:
        return -1


_STACK_TIMEOUT_S = 5.0

_STATE_NAMES = {
    "R": "running",
    "S": "sleeping",
    "D": "uninterruptible sleep, usually I/O",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead, not yet reaped",
    "X": "dead",
}


def inspect_process(pid: int, proc: Path = Path("/proc")) -> str:
    """The process's state, its kernel wait channel, and its Python stacks if py-spy is installed.

    One fact a line, stacks last; for people to read.
    """
    folder = proc / str(pid)
    try:
        status = (folder / "status").read_text()
    except OSError:
        return f"process {pid} does not exist"
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    letter = fields.get("State", "?").strip()[:1]
    lines = [f"process {pid}: {letter} ({_STATE_NAMES.get(letter, 'unknown')})"]
    channel = _kernel_wait_channel(folder)
    if channel:
        lines.append(f"waiting in the kernel in {channel}")
    return "\n".join([*lines, _dump_stacks(pid)])


def _kernel_wait_channel(folder: Path) -> str:
    try:
        channel = (folder / "wchan").read_text().strip()
    except OSError:
        return ""
    return "" if channel == "0" else channel


def _dump_stacks(pid: int) -> str:
    local = Path(sys.executable).with_name("py-spy")
    tool = str(local) if local.exists() else shutil.which("py-spy")
    if tool is None:
        return "no stacks: py-spy is not installed"
    try:
        # Non-blocking: the process may be stopped already, or must not be slowed down.
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
