"""Reads in /proc which of a node's workers are stopped, or do not run.

A process that hangs with Python's lock held answers nothing, so that somebody else has to look.
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
"""A process that is stopped, or uses no CPU, for so long has stalled; with `LOOK_INTERVAL_S` that
is known within 5 s."""
_LEAST_CPU = 0.1
"""Cores that a process uses at least while its function runs: threads that only answer use less."""
_MAX_GAP_S = 3.0  # between two looks: then this process did not run either
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcessSample:
    """The state letter of a process (or of a thread), and the CPU seconds it has used."""

    state: str
    cpu_s: float


def read_sample(folder: Path) -> ProcessSample | None:
    """Reads `stat` in `/proc/PID`, or in `/proc/PID/task/TID`; None if there is none."""
    try:
        values = (folder / "stat").read_text().rpartition(")")[2].split()
        return ProcessSample(values[0], (int(values[11]) + int(values[12])) / _TICKS_PER_S)
    except (OSError, IndexError, ValueError):
        return None


def _wants_cpu(folder: Path) -> bool:
    """Whether one of its threads can run, but may not have got a CPU."""
    with suppress(OSError):
        threads = map(read_sample, (folder / "task").iterdir())
        return any(sample is not None and sample.state == "R" for sample in threads)
    return False


@dataclass
class _Watched:
    sample: ProcessSample
    since_s: float  # when it began to be as it is
    reported: str = ""


class ProcessWatch:
    """Compares the looks at each process. Called by one thread at a time."""

    def __init__(self, proc: Path = Path("/proc"), clock: Callable[[], float] = monotonic) -> None:
        self._proc = proc
        self._clock = clock
        self._looked_s = clock()
        self._watched: dict[tuple[int, int], _Watched] = {}

    def look(self, processes: Iterable[tuple[int, int]]) -> list[ProcessStalled]:
        """The changes since the last look: processes that stalled, and those that run again.

        Args:
            processes: the worker's index and the pid of each; all that are to be watched.
        """
        now_s = self._clock()
        elapsed_s, self._looked_s = now_s - self._looked_s, now_s
        watched, changes = self._watched, []
        self._watched = {}
        for worker, pid in processes:
            sample = read_sample(self._proc / str(pid))
            if sample is None:
                continue
            before = watched.get((worker, pid))
            now = self._watched[worker, pid] = before or _Watched(sample, now_s)
            if before is None:
                continue
            state = self._state(now.sample, sample, elapsed_s)
            now.sample = sample
            if not state or elapsed_s > _MAX_GAP_S:
                now.since_s = now_s
                state = ""
            elif now_s - now.since_s < STALLED_S:
                continue
            elif state not in "Tt" and _wants_cpu(self._proc / str(pid)):
                now.since_s = now_s
                continue
            if state != now.reported:
                now.reported = state
                changes.append(ProcessStalled(worker, pid, state))
        return changes

    @staticmethod
    def _state(before: ProcessSample, sample: ProcessSample, elapsed_s: float) -> str:
        """The letter of a process that is stopped, or waits and uses no CPU; empty otherwise."""
        if sample.state in "Tt":
            return sample.state
        used = sample.cpu_s - before.cpu_s
        return sample.state if sample.state in "DS" and used < _LEAST_CPU * elapsed_s else ""
