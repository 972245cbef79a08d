"""Save a checkpoint and kill the process, with SIGKILL, before or after the n-th system call.

    python -m tests.engine.checkpoint.killed JOB STEP COUNT before|after

With COUNT -1 the save completes. Prints the names of the system calls.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from rayzero.engine.checkpoint import store_local
from tests.engine.checkpoint.saving import save

CALLS = ("open", "write", "fsync", "close", "link", "rename", "mkdir", "unlink")


class KillingOs:
    """A proxy of the `os` module that kills the process at the n-th call that modifies a disk."""

    def __init__(self, count: int, before: bool) -> None:
        self.calls: list[str] = []
        self._count = count
        self._before = before

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            fatal = len(self.calls) == self._count
            self.calls.append(name)
            if fatal and self._before:
                self._kill()
            if fatal and name == "write":  # torn write: only a part reaches the disk
                fd, data = args
                return real(fd, data[: len(data) // 2]), self._kill()
            try:
                return real(*args, **kwargs)
            finally:
                if fatal:
                    self._kill()

        return call

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def main(job: str, step: str, count: str, where: str) -> None:
    killing_os = KillingOs(int(count), where == "before")
    store_local.os = killing_os  # type: ignore[assignment]
    save(job, int(step), world=2)
    print(" ".join(killing_os.calls))


if __name__ == "__main__":
    main(*sys.argv[1:])
