"""How a worker's process ended: its signal or exit code, and the stack of a crash in native code.

Before a crashing process dies, it writes its Python stack into a memfd, which its vault has opened
in advance. The vault is not the process's parent; Linux 6.15 and newer report the exit status to
any holder of a pidfd, also while the process's memory is still being freed.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from select import POLLIN, poll
from signal import SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGKILL, SIGSEGV, Signals
from typing import TextIO

EXITED = "its process exited with code "
"""Text for a status without a signal, followed by the code."""
_MAX_REPORT_BYTES = 16 * 1024
_EXIT_WAIT_MS = 10
_CALLERS = "/rayzero/workers/worker.py"
_PIDFD_INFO = struct.Struct("QQ11Ii")  # include/uapi/linux/pidfd.h: mask, ..., exit_code
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11
_INFO_EXIT = 1 << 3
_REPORTED_SIGNALS = frozenset({SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV})  # faulthandler's
_SIGKILL_CAUSES = (
    ", by a person, the kernel's out-of-memory killer (`dmesg` tells) or a container's limit"
)


@dataclass(frozen=True)
class ProcessEnd:
    """How a process ended. What is unknown is empty.

    Attributes:
        status: such as `its process was killed by SIGSEGV`.
        stack: the stack of a crash in native code, as faulthandler writes it.
    """

    status: str = ""
    stack: str = ""


@cache
def enable_crash_report() -> TextIO:
    """Makes a fatal signal, such as SIGSEGV, write the stack of its thread into the returned file,
    which exists in memory as long as this process or a vault has it open."""
    report = os.fdopen(os.memfd_create("rayzero-crash"), "w")
    faulthandler.enable(report, all_threads=False)
    return report


def crash_report_fd() -> int:
    """Returns the descriptor of this process's crash report; -1 if there is none."""
    return enable_crash_report().fileno() if enable_crash_report.cache_info().currsize else -1


def open_crash_report(pid: int, fd: int) -> int:
    """Opens another process's report, and returns the descriptor; -1 if it has none."""
    if fd >= 0:
        with suppress(OSError):
            return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    return -1


def read_process_end(pidfds: tuple[int, ...], report_fd: int) -> ProcessEnd:
    """Returns what is known at once of a process that has just died.

    Args:
        pidfds: pidfds of the process or its threads; -1: none.
        report_fd: the result of `open_crash_report`.
    """
    pidfds = tuple(fd for fd in pidfds if fd >= 0)
    if pidfds:
        _wait_exited(pidfds)
    statuses = (_exit_status(fd) for fd in pidfds)
    status = next((status for status in statuses if status is not None), None)
    stack = b""
    # Not if the process is known to have ended otherwise: a forked child, such as a DataLoader's
    # worker, writes into the same file.
    if report_fd >= 0 and (status is None or os.WTERMSIG(status) in _REPORTED_SIGNALS):
        with suppress(OSError):
            stack = os.pread(report_fd, _MAX_REPORT_BYTES, 0)
    return ProcessEnd(_describe(status), _users_part(stack.decode(errors="replace")))


def _users_part(report: str) -> str:
    """Returns the report without the list of loaded modules and without the frames of rayzero that
    call the training function."""
    lines = report.partition("\nExtension modules:")[0].strip().splitlines()
    own_frames = (number for number, line in enumerate(lines) if _CALLERS in line)
    return "\n".join(lines[: next(own_frames, None)])


def _wait_exited(pidfds: tuple[int, ...]) -> None:
    """Waits until one of the pidfds reports an exit, at most `_EXIT_WAIT_MS`. The caller may have
    seen only that the process's sockets closed, which happens just before its last thread exits."""
    exits = poll()
    for fd in pidfds:
        exits.register(fd, POLLIN)
    exits.poll(_EXIT_WAIT_MS)


def _exit_status(pidfd: int) -> int | None:
    """Returns the status as `waitpid` does; None if the process lives, or the kernel has none."""
    try:
        request = _PIDFD_INFO.pack(_INFO_EXIT, *[0] * 13)
        reply = _PIDFD_INFO.unpack(fcntl.ioctl(pidfd, _PIDFD_GET_INFO, request))
    except OSError:
        return None
    return reply[-1] if reply[0] & _INFO_EXIT else None


def _describe(status: int | None) -> str:
    if status is None:
        return ""
    if not os.WIFSIGNALED(status):
        return f"{EXITED}{os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    name = Signals(number).name if number in set(Signals) else f"signal {number}"
    return f"its process was killed by {name}{_SIGKILL_CAUSES if number == SIGKILL else ''}"
