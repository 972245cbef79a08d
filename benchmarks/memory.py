"""Peak memory of a process during a block, with shared pages counted proportionally."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

SAMPLE_INTERVAL_S = 0.005


class PeakMemory:
    """Samples the proportional set size (PSS) in a thread, because the kernel keeps no peak of it.

    The resident set size would count memory shared by ranks once for each of them.

    Attributes:
        nbytes: the peak; final after the block.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_INTERVAL_S):
            self.nbytes = max(self.nbytes, proportional_bytes())


def proportional_bytes() -> int:
    """Current proportional set size of this process; 0 if the kernel does not report it."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
