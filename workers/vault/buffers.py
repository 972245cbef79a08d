"""Shared-memory buffers of a vault, and the free memory of this machine or container."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from rayzero.engine.errors import RayzeroError
from rayzero.workers.vault.records import VaultMemoryError


def available_bytes(root: Path = Path("/")) -> int:
    """Returns the minimum of the kernel's MemAvailable and the headroom of each cgroup limit.

    Shared memory counts as used: most limits do not allow it to be swapped out. `root` is the
    parent folder of /proc and /sys.
    """
    return min([_mem_available(root), *_cgroup_headroom(root)])


def resident_bytes() -> int:
    """Returns this process's resident memory; 0 if it cannot be determined."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGESIZE")


def _mem_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RayzeroError("/proc/meminfo has no MemAvailable line", "Linux 3.14 or newer")


def _cgroup_headroom(root: Path) -> Iterator[int]:
    """Yields the headroom of this process's cgroup and of each ancestor; the smallest applies."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = "sys/fs/cgroup"
            limit = "memory.max"
            usage = "memory.current"
            idle = "inactive"
        elif "memory" in controllers.split(","):
            base = "sys/fs/cgroup/memory"
            limit = "memory.limit_in_bytes"
            usage = "memory.usage_in_bytes"
            idle = "total_inactive"
        else:
            continue
        for group in _ancestor_cgroups(root / base, path):
            limit_bytes = _read_limit(group / limit)
            if limit_bytes is not None:
                # Inactive file pages are reclaimed when memory is needed.
                used = (_read_limit(group / usage) or 0) - _read_memory_stat(group, f"{idle}_file")
                yield max(0, limit_bytes - used)


def _ancestor_cgroups(base: Path, path: str) -> Iterator[Path]:
    """Yields the cgroup's folder and its ancestors. In a container, `path` may be the host's path
    of the cgroup that is mounted as `base`; then only `base` exists."""
    group = base / path.strip("/")
    while group != base and base in group.parents:
        yield group
        group = group.parent
    yield base


def _read_limit(path: Path) -> int | None:
    """Returns the number in a file; None if the file does not exist or holds no limit."""
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


@dataclass(eq=False)
class SharedBuffer:
    """Anonymous shared memory. It grows and never shrinks, because other processes have it mapped.
    `last_owner` is the connection that wrote it last, which may have kept its mapping."""

    fd: int
    capacity_bytes: int
    last_owner: object = None

    def grow(self, nbytes: int) -> None:
        """Grows the capacity to `nbytes`. The kernel zeroes the new pages at about 1.5 GB/s,
        without the GIL."""
        if nbytes > self.capacity_bytes:
            os.posix_fallocate(self.fd, self.capacity_bytes, nbytes - self.capacity_bytes)
            self.capacity_bytes = nbytes

    @property
    def allocated_bytes(self) -> int:
        return os.fstat(self.fd).st_blocks * 512


class BufferPool:
    """Owns the spare buffers until `trim`. Safe to use from any thread; several threads may
    allocate at once. `available` returns the machine's free memory in bytes."""

    def __init__(self, available: Callable[[], int] = available_bytes) -> None:
        self._available_bytes = available
        self._spares: list[SharedBuffer] = []
        self._growing: dict[SharedBuffer, int] = {}  # the capacity that each will have
        self._lock = Lock()  # guards the spares; held briefly
        # Two allocations must not count on the same free memory. Not held while pages are zeroed.
        self._admission_lock = Lock()

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(buffer.capacity_bytes for buffer in self._spares)

    def acquire(self, nbytes: int, owner: object = None) -> SharedBuffer:
        """Returns a buffer of at least `nbytes`: if possible a spare buffer, which keeps its
        contents, and preferably one that `owner` wrote last. Raises VaultMemoryError if there is
        not enough memory."""
        buffer = self._take_best_fitting(nbytes, owner)
        with self._admission_lock:
            missing = max(0, nbytes - buffer.capacity_bytes)
            if missing > self._unclaimed_bytes():
                self.trim()
            available = self._unclaimed_bytes() if missing else 0
            admitted = missing <= available
            if admitted:
                self._growing[buffer] = nbytes
        with suppress(OSError):  # a limit that `available` does not include
            if admitted:
                try:
                    buffer.grow(nbytes)
                finally:
                    with self._admission_lock:
                        del self._growing[buffer]
                buffer.last_owner = owner
                return buffer
        self.release([buffer])
        self.trim()
        raise VaultMemoryError(
            f"this node's vault needs {missing / 2**20:,.0f} MiB more shared memory for copies "
            "of the training state",
            allowed=f"the {available / 2**20:,.0f} MiB that are available",
            fix="set a higher memory limit of the container, or more workers (smaller shards); "
            "with `recovery.replicas: 0` and no `checkpoint.every_steps` no memory is needed",
        )

    def release(self, buffers: list[SharedBuffer]) -> None:
        with self._lock:
            self._spares += buffers

    def trim(self) -> None:
        """Frees the spare buffers."""
        with self._lock:
            spares, self._spares = self._spares, []
        self.free(spares)

    def free(self, buffers: list[SharedBuffer]) -> None:
        """Frees buffers. The kernel frees their memory when no process has it mapped any more."""
        for buffer in buffers:
            os.close(buffer.fd)

    def _unclaimed_bytes(self) -> int:
        """Returns the free memory that no growing buffer is going to take. Called with the
        admission lock held."""
        missing = (goal - buffer.allocated_bytes for buffer, goal in self._growing.items())
        # Read first: memory that is allocated meanwhile must not count as free.
        claimed = sum(max(0, nbytes) for nbytes in missing)
        return self._available_bytes() - claimed

    def _take_best_fitting(self, nbytes: int, owner: object) -> SharedBuffer:
        """Returns a spare buffer; a new, empty one if there is none. Prefers a spare of sufficient
        size, then one that `owner` wrote last, then one of the nearest size."""

        def misfit(spare: SharedBuffer) -> tuple[bool, bool, int]:
            size = spare.capacity_bytes
            return size < nbytes, spare.last_owner != owner, abs(size - nbytes)

        with self._lock:
            if not self._spares:
                return _new_buffer()
            best = min(self._spares, key=misfit)
            self._spares.remove(best)
            return best


def _new_buffer() -> SharedBuffer:
    fd = os.memfd_create("rayzero-slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    # No process that has the descriptor can truncate it under the mappings of others.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return SharedBuffer(fd, 0)
