"""Saves a checkpoint and dies, with SIGKILL, before or after the n-th call of the system.

    python -m tests.engine.checkpoint.killed JOB STEP COUNT before|after

With COUNT -1 it lives, and prints how many calls there were, and which.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from rayzero.engine.checkpoint import store_local
from tests.engine.checkpoint.saving import save

CALLS = ("open", "write", "fsync", "close", "rename", "mkdir", "unlink")


class DeadlySystem:
    """The `os` module, but for those calls that change what is on a disk."""

    def __init__(self, count: int, before: bool) -> None:
        self.made: list[str] = []
        self._count = count
        self._before = before

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def call(*arguments: Any, **named: Any) -> Any:
            fatal = len(self.made) == self._count
            self.made.append(name)
            if fatal and self._before:
                self._die()
            if fatal and name == "write":  # torn: a part of it got through
                fd, data = arguments
                return real(fd, data[: len(data) // 2]), self._die()
            done = real(*arguments, **named)
            if fatal:
                self._die()
            return done

        return call

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def main(job: str, step: str, count: str, where: str) -> None:
    system = DeadlySystem(int(count), where == "before")
    store_local.os = system  # type: ignore[assignment]
    save(job, int(step), world=2)
    print(" ".join(system.made))


if __name__ == "__main__":
    main(*sys.argv[1:])
