"""Save a checkpoint and kill the process, with SIGKILL, after the n-th system call."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from rayzero.engine.checkpoint import store_local
from tests.engine.checkpoint.saving import save

CALLS = ("open", "write", "fsync", "close", "link", "rename", "mkdir", "unlink")


class KillingOs:
    """A proxy of the `os` module that kills the process after the n-th call that modifies a disk.
    What is written before the next call is the same."""

    def __init__(self, count: int) -> None:
        self.calls: list[str] = []
        self.log: list[tuple[str, str]] = []  # each call and its file
        self._names: dict[int, str] = {}
        self._count = count

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            fatal = len(self.calls) == self._count
            self.calls.append(name)
            target = args[1] if name in ("link", "rename") else args[0]
            file = self._names[target] if isinstance(target, int) else Path(target).name
            self.log.append((name, file))
            if fatal and name == "write":  # torn write: only a part reaches the disk
                fd, data = args
                return real(fd, data[: len(data) // 2]), self._kill()
            try:
                result = real(*args, **kwargs)
                if name == "open":
                    self._names[result] = file
                return result
            finally:
                if fatal:
                    self._kill()

        return call

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def save_and_kill(job: Path, step: int, count: int) -> None:
    store_local.os = KillingOs(count)  # type: ignore[assignment]
    save(job, step)
