"""The most memory a process had while a block ran, what it shares with others counted in parts."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

EVERY_S = 0.005


class PeakMemory:
    """Samples the proportional set size: a page that two processes map is half of each one's.

    The resident size would count what ranks share once for each of them. The kernel keeps no peak
    of it, hence a thread that looks again and again; it ends with the block.

    Attributes:
        nbytes: the peak; complete when the block has ended.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join(timeout=10)

    def _watch(self) -> None:
        while not self._over.wait(EVERY_S):
            self.nbytes = max(self.nbytes, proportional_bytes())


def proportional_bytes() -> int:
    """This process's proportional set size now; 0 where the kernel does not tell."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(one.split()[1]) * 1024 for one in lines if one.startswith("Pss:")), 0)
