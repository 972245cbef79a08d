"""A dataset whose module imports little: each process of a loader imports it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

LENGTH = 40


class Items:
    """Items that a function makes of their indices."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def hang(index: int) -> Any:
    """Holds the interpreter's lock all the time, and has started a process that hangs, too."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1234)"])
    return sum(iter(int, 1))
