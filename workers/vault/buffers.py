"""Memfd pool, free memory.

The memory behind slots: buffers made, grown, and kept for the next one who needs one.

How much memory this machine, or this container, can still give.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from rayzero.engine.errors import RayzeroError
from rayzero.workers.vault.records import VaultMemoryError


def available_bytes(root: Path = Path("/")) -> int:
    """The least of what the kernel calls available and what each control group leaves.

    Shared memory counts like any other: it cannot be swapped out under most limits.

    Args:
        root: where /proc and /sys are, for tests.
    """
    return min([_mem_available(root), *_cgroup_headroom(root)])


def fits_twice(processes: int, root: Path = Path("/")) -> bool:
    """Whether so many processes like this one could each take as much memory again, and half of
    that besides. False where nobody can tell."""
    try:
        pages = int((root / "proc/self/statm").read_text().split()[1])
        return available_bytes(root) > 1.5 * processes * pages * os.sysconf("SC_PAGESIZE")
    except (OSError, ValueError, RayzeroError):
        return False


def _mem_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RayzeroError("/proc/meminfo has no MemAvailable line", "a Linux kernel since 3.14")


def _cgroup_headroom(root: Path) -> Iterator[int]:
    """What our control group and each one above it leaves: the tightest limit holds."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage, idle = "sys/fs/cgroup", "memory.max", "memory.current", "inactive"
        elif "memory" in controllers.split(","):
            base, limit, usage, idle = (
                "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive",
            )
        else:
            continue
        for group in _ancestor_cgroups(root / base, path):
            most = _read_limit(group / limit)
            if most is not None:
                # File pages that nobody uses go when memory is asked for.
                used = (_read_limit(group / usage) or 0) - _read_memory_stat(group, f"{idle}_file")
                yield max(0, most - used)


def _ancestor_cgroups(base: Path, path: str) -> Iterator[Path]:
    """The group's folder and those above it. In a container the path may be the host's name for
    what is mounted as `base`; then only `base` is there."""
    group = base / path.strip("/")
    while group != base and base in group.parents:
        yield group
        group = group.parent
    yield base


def _read_limit(path: Path) -> int | None:
    """None when there is no such file, or no limit in it."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _read_memory_stat(group: Path, name: str) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


@dataclass
class SharedBuffer:
    """Shared memory without a name. It grows and never shrinks: others have it mapped."""

    fd: int
    capacity_bytes: int

    def grow(self, nbytes: int) -> None:
        if nbytes > self.capacity_bytes:
            os.posix_fallocate(self.fd, self.capacity_bytes, nbytes - self.capacity_bytes)
            self.capacity_bytes = nbytes

    def close(self) -> None:
        os.close(self.fd)


class BufferPool:
    """Owns the spare buffers, until `close`. Safe to use from any thread.

    Args:
        available: how many bytes the machine can still give.
    """

    def __init__(self, available: Callable[[], int] = available_bytes) -> None:
        self._available_bytes = available
        self._spares: list[SharedBuffer] = []
        self._lock = Lock()  # the list; held for moments
        self._allocation_lock = Lock()  # one at a time, so that two do not count on the same memory

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(one.capacity_bytes for one in self._spares)

    def acquire(self, nbytes: int, count: int) -> list[SharedBuffer]:
        """Buffers of at least `nbytes` each, spare ones first; what they held is still in them.

        Raises:
            VaultMemoryError: there is not enough memory.
        """
        with self._allocation_lock:
            taken = self._take_best_fitting(nbytes, count)
            missing = count * nbytes - sum(min(nbytes, one.capacity_bytes) for one in taken)
            if missing > self._available_bytes():
                self.trim()
            available = self._available_bytes()
            if missing > available:
                self.release(taken)
                raise VaultMemoryError(missing, available)
            try:
                while len(taken) < count:
                    taken.append(_new_buffer())
                for one in taken:
                    one.grow(nbytes)
            except OSError:  # a limit that cannot be seen beforehand
                self.release(taken)
                self.trim()
                raise VaultMemoryError(missing, available) from None
            return taken

    def release(self, buffers: list[SharedBuffer]) -> None:
        with self._lock:
            self._spares += buffers

    def trim(self) -> None:
        """Gives the memory of the spare buffers back to the system."""
        with self._lock:
            spares, self._spares = self._spares, []
        for one in spares:
            one.close()

    def _take_best_fitting(self, nbytes: int, count: int) -> list[SharedBuffer]:
        """Up to `count` spares, the nearest in size first; those that need not grow before all."""
        with self._lock:
            self._spares.sort(
                key=lambda one: (one.capacity_bytes < nbytes, abs(one.capacity_bytes - nbytes))
            )
            taken, self._spares = self._spares[:count], self._spares[count:]
        return taken


def _new_buffer() -> SharedBuffer:
    fd = os.memfd_create("rayzero-slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    # Nobody who was handed the buffer can cut it under the others' mappings.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return SharedBuffer(fd, 0)
