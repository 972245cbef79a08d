"""Reads in /proc which of a node's workers are stopped, or use no CPU.

A process that hangs while it holds the GIL answers no request, so another process has to look.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from rayzero.workers.vault.records import ProcessStalled

LOOK_INTERVAL_S = 1.0
"""How often `look` is meant to be called."""
STALLED_S = 4.0
"""A process that is stopped, or uses no CPU, for this long has stalled. With `LOOK_INTERVAL_S`, a
stall is therefore reported within 5 s."""
_LEAST_CPU = 0.1
"""The least number of cores that a process uses while its function runs. Threads that only answer
requests use less."""
_MAX_GAP_S = 3.0  # a longer time between two looks means that this process did not run either
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcessSample:
    """The state letter of a process (or of a thread), and the CPU seconds it has used."""

    state: str
    cpu_s: float


def read_sample(folder: Path) -> ProcessSample | None:
    """Reads `stat` in `/proc/PID` or `/proc/PID/task/TID`. Returns None if there is no such
    process or thread."""
    try:
        values = (folder / "stat").read_text().rpartition(")")[2].split()
        return ProcessSample(values[0], (int(values[11]) + int(values[12])) / _TICKS_PER_S)
    except (OSError, IndexError, ValueError):
        return None


def _wants_cpu(folder: Path) -> bool:
    """Returns whether a thread of the process is runnable: it may be waiting for a CPU."""
    with suppress(OSError):
        threads = map(read_sample, (folder / "task").iterdir())
        return any(sample is not None and sample.state == "R" for sample in threads)
    return False


@dataclass
class _Watched:
    sample: ProcessSample
    since_s: float  # when the process was last seen to run
    reported: str = ""  # the state that was last reported


class ProcessWatch:
    """Compares successive samples of each process. Called by one thread at a time."""

    def __init__(self, proc: Path = Path("/proc"), clock: Callable[[], float] = monotonic) -> None:
        self._proc = proc
        self._clock = clock
        self._looked_s = clock()
        self._watched: dict[tuple[int, int], _Watched] = {}

    def look(self, processes: Iterable[tuple[int, int]]) -> list[ProcessStalled]:
        """Returns the processes that have stalled, or run again, since the last look.

        Args:
            processes: the worker's index and the pid of each process to watch.
        """
        now_s = self._clock()
        elapsed_s, self._looked_s = now_s - self._looked_s, now_s
        watched, changes = self._watched, []
        self._watched = {}
        for worker, pid in processes:
            sample = read_sample(self._proc / str(pid))
            if sample is None:
                continue
            process = watched.get((worker, pid))
            if process is None:
                self._watched[worker, pid] = _Watched(sample, now_s)
                continue
            self._watched[worker, pid] = process
            state = self._idle_state(process.sample, sample, elapsed_s)
            process.sample = sample
            if not state or elapsed_s > _MAX_GAP_S:
                process.since_s = now_s
                state = ""
            elif now_s - process.since_s < STALLED_S:
                continue
            elif state not in "Tt" and _wants_cpu(self._proc / str(pid)):
                process.since_s = now_s
                continue
            if state != process.reported:
                process.reported = state
                changes.append(ProcessStalled(worker, pid, state))
        return changes

    @staticmethod
    def _idle_state(before: ProcessSample, sample: ProcessSample, elapsed_s: float) -> str:
        """Returns the state letter of a process that is stopped, or waits and uses no CPU; an empty
        string for any other process."""
        if sample.state in "Tt":
            return sample.state
        used = sample.cpu_s - before.cpu_s
        return sample.state if sample.state in "DS" and used < _LEAST_CPU * elapsed_s else ""
