"""The memory behind slots: buffers made, grown, and kept for the next one who needs one."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from rayzero.workers.vault.errors import VaultMemoryError
from rayzero.workers.vault.memory import available_bytes


@dataclass
class Buffer:
    """Shared memory without a name. It grows and never shrinks: others have it mapped."""

    fd: int
    capacity_bytes: int

    def grow(self, nbytes: int) -> None:
        if nbytes > self.capacity_bytes:
            os.posix_fallocate(self.fd, self.capacity_bytes, nbytes - self.capacity_bytes)
            self.capacity_bytes = nbytes

    def close(self) -> None:
        os.close(self.fd)


class Pool:
    """Owns the spare buffers, until `close`. Safe to use from any thread.

    Args:
        available: how many bytes the machine can still give.
    """

    def __init__(self, available: Callable[[], int] = available_bytes) -> None:
        self._available = available
        self._spares: list[Buffer] = []
        self._lock = Lock()  # the list; held for moments
        self._allocating = Lock()  # one at a time, so that two do not count on the same memory

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(one.capacity_bytes for one in self._spares)

    def take(self, nbytes: int, count: int) -> list[Buffer]:
        """Buffers of at least `nbytes` each, spare ones first; what they held is still in them.

        Raises:
            VaultMemoryError: there is not enough memory.
        """
        with self._allocating:
            taken = self._fitting(nbytes, count)
            missing = count * nbytes - sum(min(nbytes, one.capacity_bytes) for one in taken)
            if missing > self._available():
                self.trim()
            available = self._available()
            if missing > available:
                self.give(taken)
                raise VaultMemoryError(missing, available)
            try:
                while len(taken) < count:
                    taken.append(_new())
                for one in taken:
                    one.grow(nbytes)
            except OSError:  # a limit that cannot be seen beforehand
                self.give(taken)
                self.trim()
                raise VaultMemoryError(missing, available) from None
            return taken

    def give(self, buffers: list[Buffer]) -> None:
        with self._lock:
            self._spares += buffers

    def trim(self) -> None:
        """Gives the memory of the spare buffers back to the system."""
        with self._lock:
            spares, self._spares = self._spares, []
        for one in spares:
            one.close()

    def _fitting(self, nbytes: int, count: int) -> list[Buffer]:
        """Up to `count` spares, the nearest in size first; those that need not grow before all."""
        with self._lock:
            self._spares.sort(
                key=lambda one: (one.capacity_bytes < nbytes, abs(one.capacity_bytes - nbytes))
            )
            taken, self._spares = self._spares[:count], self._spares[count:]
        return taken


def _new() -> Buffer:
    fd = os.memfd_create("rayzero-slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    # Nobody who was handed the buffer can cut it under the others' mappings.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return Buffer(fd, 0)
