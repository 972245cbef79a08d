"""The vault's buffers in a worker's memory: mapping them, and registering them with its device.

Lifetime. A mapping lives as long as an object refers to it. The slot's writer does; once the
mapping is registered with a device, the `VaultClient` does, too, across generations, because
registering 10 GB takes seconds. A mapping is unregistered when it is no longer needed, before it is
unmapped, and never while a copy of the device may still write it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, sleep

import numpy as np

from rayzero.engine.errors import EngineError, RayzeroError

log = logging.getLogger("rayzero.workers")

_MADV_POPULATE_WRITE = 23  # Linux 5.14
_POLL_S = 0.001

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class SlotMapping:
    """One buffer of the vault, mapped as a whole.

    Attributes:
        memory: the buffer's bytes.
        is_busy: returns whether a device may still be writing `memory`. Raises the device's errors.
    """

    def __init__(self, fd: int) -> None:
        """Maps the buffer and populates its pages, so that no training step pays for page faults.
        The caller may close `fd` afterwards."""
        self.memory = mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED)
        self.is_busy: Callable[[], bool] = lambda: False
        self._unregister: Callable[[], None] | None = None
        _populate(self.memory)

    @property
    def registered(self) -> bool:
        return self._unregister is not None

    def covers(self, fd: int) -> bool:
        """Returns whether the mapping covers the whole buffer, which may have grown since."""
        return len(self.memory) >= os.fstat(fd).st_size

    def register(self, register: Callable[[mmap.mmap], Callable[[], None]]) -> None:
        """Registers the memory with a device, unless it is registered: calls `register`, which
        returns the function that `close` calls to unregister it."""
        if self._unregister is None:
            self._unregister = register(self.memory)

    def wait_idle(self, timeout_s: float) -> None:
        """Waits until no device writes the memory: the copies of an interrupted mirror may still be
        in flight. Raises EngineError at the timeout."""
        deadline = monotonic() + timeout_s
        while self.is_busy():
            if monotonic() > deadline:
                raise EngineError(
                    f"a copy into {len(self.memory) / 2**30:.2f} GiB of host memory has not ended "
                    f"after {timeout_s:g} s",
                    allowed="a device that runs what is queued on it",
                )
            sleep(_POLL_S)

    def close(self, timeout_s: float) -> None:
        """Unregisters the memory, unless a copy is still in flight at the timeout: then the memory
        stays registered until the process ends."""
        unregister, self._unregister = self._unregister, None
        try:
            self.wait_idle(timeout_s)
            if unregister is not None:
                unregister()
        except (RayzeroError, RuntimeError) as error:  # torch's errors of a device, too
            log.warning("a slot's memory stays registered: %s", error)


def _populate(memory: mmap.mmap) -> None:
    """Maps all pages without holding the GIL, which `MAP_POPULATE` and Python's madvise hold for
    seconds. Uses huge pages where the kernel has them for shared memory (`shmem_enabled`)."""
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    pages = np.frombuffer(memory, np.uint8)
    if pages.size and _madvise(pages.ctypes.data, pages.size, _MADV_POPULATE_WRITE):
        pages[:: mmap.PAGESIZE].max()  # an older kernel
