"""A worker's connection to its vault, as the vault holds it, and the process behind it."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import BoundedSemaphore

from rayzero.workers.agent.link import peer_of
from rayzero.workers.stacks import TRAINING_THREAD
from rayzero.workers.vault.process_end import open_crash_report

MAX_SLOW_REQUESTS = 16
"""Limit for one connection, including queued requests."""
_PIDFD_THREAD = os.O_EXCL  # PIDFD_THREAD, Linux 6.9


@dataclass(eq=False)
class Peer:
    """One worker's connection, and its process.

    Attributes:
        host_pid: the process's pid in the vault's pid namespace.
        pidfd: refers to the process, even if its pid is reused; -1: unavailable.
        worker: the worker's index while it is registered; otherwise -1.
        pid: the process's pid in its own pid namespace.
        thread_fd: refers to a thread that exits when the process dies or deregisters; -1:
            unavailable.
        report_fd: the process's crash report; -1: none.
        slow_requests: limits the slow requests in flight.
    """

    socket: socket.socket
    host_pid: int
    pidfd: int
    worker: int = -1
    pid: int = 0
    thread_fd: int = -1
    report_fd: int = -1
    closed: bool = False
    slow_requests: BoundedSemaphore = field(
        default_factory=lambda: BoundedSemaphore(MAX_SLOW_REQUESTS), repr=False
    )

    def register(self, worker: int, pid: int, thread: int, report_fd: int) -> None:
        self.worker, self.pid = worker, pid
        own_thread = Path(f"/proc/{pid}/task/{thread}").exists()
        if self.thread_fd < 0 and pid == self.host_pid and own_thread:
            self.thread_fd = _open_pidfd(thread, _PIDFD_THREAD)
            self.report_fd = open_crash_report(pid, report_fd)


def accept_peer(connection: socket.socket) -> Peer | None:
    """Returns the peer of a new connection. Closes the connection of another user's process, and
    returns None."""
    pid, user = peer_of(connection)
    if user != os.getuid():
        connection.close()
        return None
    connection.setblocking(False)
    return Peer(connection, pid, _open_pidfd(pid))


def _open_pidfd(task: int, flags: int = 0) -> int:
    """Returns a pidfd of a process or thread; -1 if it has exited or is in another pid namespace,
    or the kernel does not support the flags."""
    try:
        return os.pidfd_open(task, flags)
    except OSError:
        return -1


_STACK_TIMEOUT_S = 5.0


def inspect_process(pid: int) -> str:
    """Returns the process's state, its kernel wait channel, and its Python stacks if py-spy is
    installed: text for people, one fact a line, the stacks last."""
    folder = Path(f"/proc/{pid}")
    try:
        status = (folder / "status").read_text()
    except OSError:
        return f"process {pid} does not exist"
    state = next(line for line in status.splitlines() if line.startswith("State:"))
    lines = [f"process {pid}: {state.removeprefix('State:').strip()}"]
    with suppress(OSError):
        channel = (folder / "wchan").read_text().strip()
        if channel not in ("", "0"):
            lines.append(f"waiting in the kernel in {channel}")
    return "\n".join([*lines, _dump_stacks(pid)])


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
    if done.returncode:
        return f"no stacks: {done.stderr.strip()}"
    threads = re.split(r"^(?=Thread )", done.stdout.strip(), flags=re.MULTILINE)
    training = [stack for stack in threads if f'"{TRAINING_THREAD}"' in stack]
    return "".join(training or threads).strip()
